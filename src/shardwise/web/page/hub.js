// Models by their names on a hub. The browser fetches their config.json and nothing else; whoever
// answers the question checks it as a pasted one.

const hub = document.querySelector('meta[name="shardwise-hub"]').content;
// As much as may be pasted.
const MOST_BYTES = 2 ** 20, PATIENCE_MS = 30_000;
const kept = new Map();

// Why the hub does not give a file.
function refusal(response, model, revision) {
  const code = response.headers.get("X-Error-Code");
  if (code === "GatedRepo" || response.status === 403)
    return `${model} is gated: accept its licence at ${hub}/${model}, and paste its config.json.`;
  if (code === "RevisionNotFound") return `${model} has no revision ${revision} on ${hub}.`;
  if (code === "EntryNotFound") return `${model} has no config.json on ${hub}.`;
  if (code === "RepoNotFound" || [401, 404].includes(response.status))
    return `There is no model ${model} on ${hub}, or it is private: check the spelling, or paste its config.json.`;
  return `${hub} answered with status ${response.status} for ${model}: try again later, or paste its config.json.`;
}

// The text of a response; null if it is too large.
async function bounded(response) {
  const tooLarge = (bytes) => bytes > MOST_BYTES;
  if (tooLarge(Number(response.headers.get("Content-Length")))) return null;
  const parts = [];
  let bytes = 0;
  for (const reader = response.body.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) return new Blob(parts).text();
    parts.push(value);
    bytes += value.length;
    if (tooLarge(bytes)) { await reader.cancel(); return null; }
  }
}

async function fetched(model, revision) {
  const ending = new AbortController();
  const patience = setTimeout(() => ending.abort(), PATIENCE_MS);
  let response, text;
  try {
    const address = `${hub}/${model}/resolve/${encodeURIComponent(revision)}/config.json`;
    response = await fetch(address, { credentials: "omit", referrerPolicy: "no-referrer", signal: ending.signal });
    if (response.ok) text = await bounded(response);
  } catch {
    throw new Error(`${model} cannot be looked up on ${hub}: check the network, or paste its config.json.`);
  } finally {
    clearTimeout(patience);
    ending.abort();
  }
  if (!response.ok) throw new Error(refusal(response, model, revision));
  if (text === null) throw new Error(`The config.json of ${model} is too large: over ${MOST_BYTES.toLocaleString("en")} bytes.`);
  return text;
}

// The question, with the config.json of a model that the catalogue does not have.
export async function withConfig(question, catalogue) {
  const found = new RegExp(`^${catalogue.hub_name}$`).exec(question.model ?? "");
  const presets = catalogue.models.flatMap((model) => model.hub.map((name) => name.toLowerCase()));
  if (!found || presets.includes(question.model.toLowerCase())) return question;
  if (!kept.has(question.model)) kept.set(question.model, await fetched(found[1], found[2] ?? "main"));
  return { ...question, config: kept.get(question.model) };
}
