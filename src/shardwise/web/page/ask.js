// Ways to ask: Python in this browser, or the server that sent this page.

// One question at a time. Of those of a kind that wait, only the newest is asked; the others are
// answered with null. Curves wait until nothing else does.
class Lane {
  constructor(send) { this.send = send; this.busy = false; this.waiting = new Map(); }
  ask(question) {
    const kind = question.ask === "curve" ? question.vary : "";
    return new Promise((resolve, reject) => {
      this.waiting.get(kind)?.resolve(null);
      this.waiting.set(kind, { question, resolve, reject });
      this.next();
    });
  }
  async next() {
    if (this.busy || !this.waiting.size) return;
    const kind = this.waiting.has("") ? "" : this.waiting.keys().next().value;
    const { question, resolve, reject } = this.waiting.get(kind);
    this.waiting.delete(kind);
    this.busy = true;
    try { resolve(JSON.parse(await this.send(JSON.stringify(question)))); } catch (error) { reject(error); }
    this.busy = false;
    this.next();
  }
}

function startWorker(told) {
  return new Promise((resolve, reject) => {
    const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
    const open = new Map();
    let last = 0;
    const failure = (message, fatal) => Object.assign(new Error(message), { fatal });
    worker.onmessage = ({ data }) => {
      if (data.stage) told(data.stage, data.done);
      else if (data.failed) reject(new Error(data.failed));
      else if (data.ready) resolve({ send, stop: () => worker.terminate() });
      else {
        const { answered, refused } = open.get(data.id);
        open.delete(data.id);
        if (data.problem) refused(failure(data.problem, data.fatal));
        else answered(data.answer);
      }
    };
    worker.onerror = (event) => {
      const error = failure(event.message || "The planner could not be started.", true);
      reject(error);
      open.forEach(({ refused }) => refused(error));
      open.clear();
    };
    const send = (question) => new Promise((answered, refused) => {
      open.set(++last, { answered, refused });
      worker.postMessage({ id: last, question });
    });
  });
}

// Sends questions to a worker, and to another one after an error that Python did not survive.
async function startPython(told) {
  let worker = await startWorker(told);
  return async (question) => {
    worker ??= await startWorker(() => {});
    try { return await worker.send(question); } catch (error) {
      if (error.fatal) { worker.stop(); worker = null; }
      throw error;
    }
  };
}

// Not every browser tells when it is idle.
const idle = globalThis.requestIdleCallback ?? ((then) => setTimeout(then, 200));

// A search takes seconds: estimates have a Python of their own, started when the first answer is
// there, so that a slider never waits for a search.
async function inBrowser(told) {
  const searches = new Lane(await startPython(told));
  let estimates = null;
  const second = () => { estimates ??= startPython(() => {}).then((send) => new Lane(send)); return estimates; };
  return {
    search: (question) => searches.ask(question),
    estimate: async (question) => (await second()).ask(question),
    link: (address) => address,
    // Not before the answer is drawn: Python's start takes every core.
    prepare: () => idle(() => second().catch(() => { estimates = Promise.resolve(searches); })),
  };
}

// The sentence with which the server refused.
async function refusal(response) {
  const { problems } = await response.json().catch(() => ({}));
  return new Error(problems?.[0] ?? `The server answered ${response.status}.`);
}

async function onServer(told) {
  told("Connecting", 1);
  const token = new URLSearchParams(location.hash.slice(1)).get("token") ?? sessionStorage.getItem("token") ?? "";
  sessionStorage.setItem("token", token);
  const headers = { "Content-Type": "application/json", Authorization: `Bearer ${token}` };
  const send = async (question) => {
    const response = await fetch("api/answer", { method: "POST", headers, body: question });
    if (response.status === 401) throw new Error("Open the address that 'shardwise serve' printed: it holds the token.");
    // A question that cannot be read has its problems told as any other.
    if (!response.ok && response.status !== 422) throw await refusal(response);
    return response.text();
  };
  const runs = async () => {
    const response = await fetch("api/runs", { headers });
    if (!response.ok) throw await refusal(response);
    return (await response.json()).runs;
  };
  const searches = new Lane(send), estimates = new Lane(send);
  return {
    search: (question) => searches.ask(question),
    estimate: (question) => estimates.ask(question),
    // An address of this machine is of no use to others, and its token is a secret.
    link: null,
    prepare: () => {},
    runs: async () => (await runs()).map((name) => ({ name, href: `runs/${encodeURIComponent(name)}?token=${encodeURIComponent(token)}` })),
  };
}

export const connect = (told) =>
  document.querySelector('meta[name="shardwise-planner"]').content === "server" ? onServer(told) : inBrowser(told);
