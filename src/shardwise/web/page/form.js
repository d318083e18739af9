// The form: what is asked, and its state in the address of the page.

const form = document.getElementById("question");
const FIELDS = ["model", "config", "adapter", "rank", "instance", "device", "nodes", "per-node", "network", "seq-len",
  "global-batch", "optimizer", "precision", "objective", "for-stack", "compile",
  "allow-low-precision-reduce", "tokens", "price", "deadline", "strategy", "micro-batch", "recompute", "loss",
  "states", "offload", "offload-optimizer", "offload-activations"];
// Fields of a configuration of one's own; without a strategy they say nothing.
const OWN = ["micro-batch", "recompute", "loss"];
// What each field of offload moves to the CPU.
const OFFLOADS = { "offload": "parameters", "offload-optimizer": "optimizer", "offload-activations": "activations" };
const field = (name) => form.elements.namedItem(name);
// What an instance decides itself.
const OF_INSTANCE = ["device", "per-node", "network"];
const first = {}, titles = {};
// Quantities that sliders moved are in the address after this.
const MOVED = "if-";

// Options come from the catalogue; all of it reaches the page as text.
export function fillForm(catalogue) {
  document.getElementById("models").replaceChildren(...catalogue.models.map((model) => {
    const option = document.createElement("option");
    option.value = model.name;
    option.label = `${model.size} parameters`;
    return option;
  }));
  addOptions("device", catalogue.devices.map((device) => [device.name, `${device.name}, ${device.memory}`]));
  for (const device of catalogue.devices) titles[device.name] = device.title;
  addOptions("instance", catalogue.instances.map((one) => [one.name, `${one.name}, ${one.gpus} × ${one.device} (${one.provider})`]));
  addOptions("optimizer", catalogue.optimizers.map((name) => [name === "adamw" ? "" : name, name]));
  addOptions("for-stack", catalogue.stacks.map((name) => [name, name]));
  field("device").value = "H100-SXM";
  for (const name of FIELDS) first[name] = field(name).value;
  readAddress();
  follow();
}

function addOptions(name, options) {
  for (const [value, label] of options) {
    const option = document.createElement("option");
    option.value = value;
    option.textContent = label;
    field(name).append(option);
  }
}

// Fields that depend on others.
function follow() {
  const rented = field("instance").value !== "";
  document.getElementById("device-title").textContent = rented ? "" : titles[field("device").value] ?? "";
  for (const name of OF_INSTANCE) field(name).disabled = rented;
  field("rank").disabled = field("adapter").value === "";
  for (const name of OWN) field(name).disabled = field("strategy").value === "";
  field("model").disabled = field("config").value.trim() !== "";
}

export function question() {
  const text = (name) => field(name).value.trim() || undefined;
  const nodes = text("nodes") ?? "1", network = text("network");
  const wire = network ? `@${network}Gbps` : "";
  return {
    ask: "plan",
    model: text("config") ?? text("model"),
    cluster: text("instance")
      ? `${nodes}x${text("instance")}`
      : `${nodes}x${text("per-node") ?? "1"}x${text("device")}${wire}`,
    adapter: text("adapter") && `${text("adapter")}:${text("rank") ?? 16}`,
    seq_len: text("seq-len"),
    global_batch: text("global-batch"),
    optimizer: text("optimizer"),
    precision: text("precision"),
    objective: text("objective"),
    for_stack: text("for-stack"),
    states: text("states"),
    offload: offloaded() || undefined,
    compile: text("compile") && true,
    low_precision_reduce: text("allow-low-precision-reduce") && true,
    tokens: text("tokens"),
    price: text("price"),
    deadline: text("deadline") && Number(text("deadline")),
  };
}

// What is offloaded, such as "optimizer+activations"; empty for nothing.
function offloaded() {
  return Object.keys(OFFLOADS).filter((name) => field(name).value !== "").map((name) => OFFLOADS[name]).join("+");
}

// The strategy that somebody wants to see; null to show the best one.
export function ownConfiguration() {
  const kind = field("strategy").value;
  if (!kind) return null;
  const micro_batch = Number(field("micro-batch").value) || 1;
  const loss = field("loss").value || "plain";
  return { kind, micro_batch, recompute: field("recompute").value || "none", loss, offload: offloaded() || false };
}

// Sets fields, as somebody would who filled them in; one without a value is only shown.
export function setFields(values) {
  let last = null;
  for (const [name, value] of values) {
    last = field(name);
    last.closest("details")?.setAttribute("open", "");
    if (value) last.value = value;
  }
  last.focus();
  if (values.some(([, value]) => value)) last.dispatchEvent(new Event("input", { bubbles: true }));
}

// `shown` is what is shown of the answer: the layout that was chosen, and what sliders moved.
export function address({ layout, change }) {
  const told = new URLSearchParams();
  for (const name of FIELDS) if (field(name).value !== first[name]) told.set(name, field(name).value);
  if (layout) told.set("layout", layout);
  for (const [name, value] of Object.entries(change)) told.set(MOVED + name, value);
  return `#${told}`;
}

export function addressed() {
  const told = [...new URLSearchParams(location.hash.slice(1))];
  const moved = told.filter(([name]) => name.startsWith(MOVED)).map(([name, value]) => [name.slice(MOVED.length), value]);
  return { layout: told.find(([name]) => name === "layout")?.[1], change: Object.fromEntries(moved) };
}

function readAddress() {
  // A form without scripts puts its fields behind a question mark.
  const told = new URLSearchParams(location.hash.slice(1) || location.search);
  for (const name of FIELDS) {
    const value = told.get(name);
    // A field for numbers takes nothing else, and complains on the console.
    const fits = value !== null && (field(name).type !== "number" || Number.isFinite(Number(value)));
    if (!fits) { field(name).value = first[name]; continue; }
    field(name).value = value;
    // A select keeps no value that it does not have.
    if (field(name).value !== value && field(name).tagName === "SELECT") field(name).value = first[name];
    field(name).closest("details")?.setAttribute("open", "");
  }
}

// `changed` is called when a question is complete: when typing rests, a choice is made, or an
// address is opened, whose layout and changes it is then given. `typed` is called at once.
export function watchForm(changed, typed) {
  let timer = 0;
  const soon = (wait, shown) => { typed(); clearTimeout(timer); timer = setTimeout(() => changed(shown), wait); };
  form.addEventListener("input", (event) => { follow(); soon(event.target.tagName === "SELECT" ? 0 : 600); });
  form.addEventListener("submit", (event) => { event.preventDefault(); soon(0); });
  addEventListener("hashchange", () => {
    // A link to a part of this page is no question.
    if (!location.hash.includes("=") && location.hash.length > 1) return;
    readAddress();
    follow();
    soon(0, addressed());
  });
}
