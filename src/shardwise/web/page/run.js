// What to do with the answer: the file, the command, exports for other stacks, and the address.

async function copy(text, button) {
  const said = button.textContent;
  try { await navigator.clipboard.writeText(text); } catch {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = said; }, 1500);
}

function make(tag, options = {}, ...content) {
  const made = Object.assign(document.createElement(tag), options);
  made.append(...content);
  return made;
}

// `exported(stack)` answers with the file of another stack; `linked()` is the address of
// what is shown; null where others cannot open it.
export function drawRun(place, answer, stacks, { exported, linked }) {
  const code = make("code"), told = make("div"), text = { now: "" };
  const start = make("div", { className: "start" });
  const file = make("div", { className: "file" }, make("pre", { tabIndex: 0 }, code));
  const button = make("button", { type: "button", className: "copy", textContent: "Copy file" });
  button.addEventListener("click", () => copy(text.now, button));
  const link = make("button", { type: "button", className: "copy", textContent: "Copy link to this plan", hidden: !linked });
  link.addEventListener("click", () => copy(linked(), link));
  // The file, what to know about it, and the command that starts it.
  const show = (content, sentences = [], command = "") => {
    text.now = code.textContent = content;
    file.hidden = button.disabled = !content;
    const also = make("button", { type: "button", className: "copy", textContent: "Copy command" });
    also.addEventListener("click", () => copy(command, also));
    const line = make("pre", { tabIndex: 0 }, make("code", { textContent: command }));
    start.replaceChildren(...(command ? [line, also] : []));
    told.replaceChildren(...sentences.map((sentence) =>
      make("p", { className: sentence === answer.before ? "before" : "fine", textContent: sentence })));
  };
  // A chosen layout has no command that plans it: its file is what holds it.
  const lines = [answer.install, answer.command, answer.start].filter(Boolean);
  const how = answer.command ? "The first line installs, the second plans and writes run.toml, the third trains."
    : "Save the file of the tab run.toml as run.toml first. The first line installs, the second trains.";
  const shown = {
    "run.toml": () => show(answer.run, [answer.before, "Save it as run.toml, and start it with this:"], answer.start),
    command: () => show(lines.join("\n"), [how, answer.before]),
    JSON: () => show(answer.json),
    cluster: () => show(answer.cluster, ["cluster.toml: for --cluster cluster.toml"]),
  };
  if (!/^memory = /m.test(answer.cluster)) delete shown.cluster;
  const tabs = make("div", { className: "tabs", role: "tablist" });
  tabs.setAttribute("aria-label", "files");
  const select = (chosen) => {
    for (const tab of tabs.querySelectorAll("button")) tab.setAttribute("aria-selected", String(tab === chosen));
  };
  for (const [name, open] of Object.entries(shown)) {
    const tab = make("button", { type: "button", textContent: name });
    tab.setAttribute("role", "tab");
    tab.addEventListener("click", () => { select(tab); other.value = ""; open(); });
    tabs.append(tab);
  }
  const other = make("select", { id: "export-to" }, make("option", { value: "", textContent: "export for …" }),
    ...stacks.map((name) => make("option", { value: name, textContent: name })));
  other.setAttribute("aria-label", "export for another stack");
  other.addEventListener("change", async () => {
    if (!other.value) return;
    select(null);
    show("", [`Writing the file for ${other.value} …`]);
    const found = await exported(other.value);
    if (!found) return;
    if (found.problems.length) show("", found.problems);
    else show(found.export.text, [...found.export.unsupported, ...found.export.in_script,
      `Save it as ${found.export.name}, and start it with this:`], found.export.command);
  });
  const actions = make("div", { className: "copies" }, button, link, other);
  place.replaceChildren(tabs, actions, told, start, file);
  select(tabs.firstElementChild);
  shown["run.toml"]();
}
