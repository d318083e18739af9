// The planner itself: Python in a thread of its own. All files are fetched here, so that progress
// can be told, and checked against the hashes of files.json.
import { loadPyodide } from "./runtime/pyodide.mjs";

const here = new URL(".", self.location.href);
const kept = new Map();

async function digest(bytes) {
  if (!self.crypto?.subtle) return null; // not over plain http; the runtime checks packages itself
  const hash = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return Array.from(hash, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function download(file, told) {
  const url = new URL(file.url, here).href;
  const response = await fetch(url);
  if (!response.ok) throw new Error(`${file.url}: the server answered ${response.status}`);
  const parts = [];
  for (const reader = response.body.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) break;
    parts.push(value);
    told(value.length);
  }
  const bytes = new Uint8Array(await new Blob(parts).arrayBuffer());
  const found = await digest(bytes);
  if (found !== null && found !== file.sha256) throw new Error(`${file.url}: the file is damaged`);
  kept.set(url, bytes);
}

async function start() {
  const { files, version } = await (await fetch(new URL("files.json", here))).json();
  const fetched = files.filter((file) => file.fetched);
  const total = fetched.reduce((sum, file) => sum + file.bytes, 0);
  let done = 0;
  const told = (bytes) => { done += bytes; postMessage({ stage: "Loading the planner", done: done / total }); };
  await Promise.all(fetched.map((file) => download(file, told)));
  // What was downloaded reaches the runtime without a second request.
  const network = self.fetch;
  self.fetch = (what, options) => {
    const bytes = kept.get(new URL(what?.url ?? what, here).href);
    if (!bytes) return network(what, options);
    const type = String(what).endsWith(".wasm") ? "application/wasm" : "application/octet-stream";
    return Promise.resolve(new Response(bytes, { headers: { "Content-Type": type } }));
  };
  postMessage({ stage: "Starting Python", done: 1 });
  const python = await loadPyodide({
    indexURL: new URL("runtime/", here).href,
    lockFileURL: new URL("packages.json", here).href,
    packageBaseUrl: new URL("runtime/", here).href,
    packages: ["shardwise"],
    env: { HOME: "/home/pyodide" },
  });
  self.fetch = network;
  kept.clear();
  python.runPython("from shardwise.web.answer import answer");
  const answer = python.globals.get("answer");
  self.onmessage = ({ data: { id, question } }) => {
    try { postMessage({ id, answer: answer(question) }); } catch (error) {
      // An exception of Python has a type; after any other error Python cannot go on.
      const kind = error.type ?? error.name;
      postMessage({ id, fatal: !error.type, problem: `The planner failed on this question: ${kind}. This is a bug; report it.` });
    }
  };
  postMessage({ ready: version });
}

start().catch((error) => postMessage({ failed: String(error.message ?? error).slice(0, 500) }));
