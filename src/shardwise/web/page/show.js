// Puts answers on the page. Pieces of HTML come from the planner, which escapes all text of others.

const piece = (name) => document.getElementById(name);
const PLACES = { timeline: "timeline-piece" };

// Milliseconds that may be drawn at once, so that the page always reacts.
const AT_ONCE_MS = 12;

// Until what was drawn is on the screen. A page that nobody sees has no frames.
const shown = () => new Promise((done) => {
  requestAnimationFrame(() => setTimeout(done));
  setTimeout(done, 100);
});

// Draws parts one after the other, as long as `wanted`: all at once would block the page.
export async function drawInTurn(parts, wanted) {
  let begun = performance.now();
  for (const draw of parts) {
    draw();
    document.body.offsetHeight; // lays out what was drawn, so that its time counts too
    if (performance.now() - begun > AT_ONCE_MS) { await shown(); begun = performance.now(); }
    if (!wanted()) return false;
  }
  return true;
}

export function showPiece(html, name) {
  piece(PLACES[name] ?? name).innerHTML = html[name] ?? "";
  const section = piece(`${name}-section`);
  if (section) section.hidden = !html[name];
  if (name === "timeline" && html.timeline) drawTimeline();
}

function paragraphs(place, sentences) {
  place.replaceChildren(...sentences.map((sentence) => {
    const line = document.createElement("p");
    line.textContent = sentence;
    return line;
  }));
}

const showProblems = (sentences) => paragraphs(piece("problems"), sentences);
export const showNotes = (sentences) => paragraphs(piece("notes"), sentences);

export function showStage(text, share) {
  piece("loading").hidden = text === null;
  if (text === null) return;
  piece("stage").textContent = text;
  if (share === undefined) piece("progress").removeAttribute("value");
  else piece("progress").value = share;
}

// What nobody should use while it belongs to an earlier question: the file alone, all but the
// sliders, or all.
const OUTDATED = {
  none: () => false,
  run: (part) => part.id === "run-section",
  answer: (part) => part.id !== "whatif-section",
  all: () => true,
};

function showState(busy, outdated) {
  const answer = piece("answer");
  answer.setAttribute("aria-busy", String(busy));
  for (const part of answer.children)
    if (!["loading", "problems"].includes(part.id)) part.inert = OUTDATED[outdated](part);
}

export function showAsking(stage, outdated) {
  showStage(stage);
  showState(true, outdated);
}

export function showReady() {
  showStage(null);
  showProblems([]);
  showState(false, "none");
}

// The answer on the page is to an earlier question, `fresh` where that was of another form.
export function showFailed(problems, fresh) {
  showStage(null);
  showProblems(problems);
  showNotes([]);
  showState(false, fresh ? "all" : "answer");
}

export function pressLayout(number) {
  for (const button of document.querySelectorAll("button.layout"))
    button.setAttribute("aria-pressed", String(Number(button.dataset.layout) === number));
}

export function showRuns(runs) {
  piece("runs-section").hidden = runs.length === 0;
  piece("runs").replaceChildren(...runs.map(({ name, href }) => {
    const line = document.createElement("li"), link = document.createElement("a");
    Object.assign(link, { href, textContent: name, target: "_blank", rel: "noreferrer" });
    line.append(link);
    return line;
  }));
}

// What belongs to an earlier answer, until it is drawn again.
export function showStale(names, stale) {
  for (const name of names) piece(`${name}-section`).classList.toggle("stale", stale);
}
