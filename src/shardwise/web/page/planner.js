// The planner's page: asks when the form rests, and shows the answer.
import { connect } from "./ask.js";
import { address, addressed, fillForm, setFields, ownConfiguration, question, watchForm } from "./form.js";
import { withConfig } from "./hub.js";
import { drawRun } from "./run.js";
import { drawInTurn, pressLayout, showAsking, showFailed, showNotes, showPiece, showReady, showRuns, showStage, showStale } from "./show.js";
import { drawSliders } from "./whatif.js";

const PLAN = ["about", "verdict", "tiles", "cost", "changed", "memory", "why", "layouts", "time", "timeline", "front"];
const STEP = ["about", "verdict", "tiles", "cost", "changed", "memory", "time", "timeline"];
// What an answer about one configuration leaves as it was.
const BESIDE = ["why", "layouts", "front"];
// What was asked last, what was answered, and what is shown of it: the changes of sliders, the name
// of a chosen layout, its strategy. Figures are those of the last answer that somebody let stand,
// which the next one is compared with. `fresh` until sliders are drawn for the question. `turn`
// counts what was asked, and `searched` is that of the last search.
const now = { asked: null, plan: null, change: {}, layout: null, strategy: null, figures: undefined, fresh: true, turn: 0, searched: 0 };
let planner = null, catalogue = null;

const isMoved = (change) => Object.keys(change).length > 0;

function failed(error) {
  showFailed([String(error.message ?? error)], now.fresh);
}

// What was asked before is not shown any more.
function outdate(fresh) {
  now.searched = ++now.turn;
  showAsking("Searching for the best configuration", fresh ? "all" : "answer");
}

// Asks the form, or with `moved` the same question after a slider.
async function search({ change = {}, layout = null } = {}, moved = false) {
  if (!moved) now.fresh = true;
  outdate(now.fresh);
  const turn = now.searched;
  if (!moved) {
    const asked = await withConfig(question(), catalogue).catch((error) => ({ error }));
    if (turn !== now.searched) return; // a newer question is asked
    if (asked.error) throw asked.error;
    now.asked = asked;
  }
  // Another job is no change of this one.
  const answer = await planner.search({ ...now.asked, change, before: moved ? now.figures : undefined });
  if (answer === null || turn !== now.searched) return; // a newer question waits
  if (answer.problems.length) { showFailed(answer.problems, now.fresh); return; }
  Object.assign(now, { plan: answer, figures: answer.figures, change, layout: null, strategy: answer.strategy });
  showNotes(answer.notes);
  const parts = [...PLAN.map((name) => () => showPiece(answer.html, name)), () => besidePlan(answer), () => offerRun(answer), () => offerSliders(answer)];
  if (!await drawInTurn(parts, () => turn === now.searched)) return;
  showReady();
  planner.prepare();
  const number = answer.layouts.findIndex((one) => one.name === layout);
  const own = ownConfiguration();
  if (own) await showOwn(own);
  else if (number > 0) await choose(number);
  else if (layout && number < 0) showNotes([...answer.notes, `The layout ${layout} of the address is not among those compared.`]);
  keepAddress();
}

function besidePlan(answer) {
  showStale(["timeline", ...BESIDE], false);
  document.getElementById("cluster-picture").innerHTML = answer.html.picture ?? "";
  pressLayout(0);
}

const keepAddress = () => history.replaceState(null, "", address(now));

function offerRun(answer) {
  document.getElementById("run-section").hidden = !answer.run;
  if (answer.run) showRun(answer);
}

function offerSliders(answer) {
  // Where nothing fits after a slider moved, it can move back.
  for (const name of ["whatif-section", "curves-section"])
    document.getElementById(name).hidden = !answer.run && !isMoved(now.change);
  if (!now.fresh) return;
  now.fresh = false;
  drawSliders(document.getElementById("sliders"), document.getElementById("curves"), answer.at, { ...now.change }, {
    moved: (change) => { if (now.strategy) estimate(now.strategy, change, false).catch(failed); },
    rested: (change) => search({ change }, true).catch(failed),
    curve: async (vary, values) => (await planner.search({ ...now.asked, ask: "curve", vary, values }))?.html?.curve ?? "",
  });
}

function showRun(answer) {
  drawRun(document.getElementById("run"), answer, catalogue.stacks, {
    exported: (to) => planner.estimate({ ...configured(answer.strategy, now.change), ask: "export", to }),
    linked: planner.link && (() => planner.link(new URL(address(now), location.href).href)),
  });
}

// A configuration of the plan, on what the search and the sliders chose. Its micro-batches make the
// batch, which may be only near the one asked for.
function configured(strategy, change, batch) {
  const { global_batch, ...asked } = now.asked;
  return { ...asked, global_batch: batch, strategy, change: { ...now.plan.searched, ...change } };
}

// Shows one configuration. A timeline would not follow a slider.
async function estimate(strategy, change, timeline = true, batch = undefined) {
  const turn = ++now.turn;
  showAsking("Predicting this configuration", "run");
  const answer = await planner.estimate({ ...configured(strategy, change, batch), ask: "estimate", timeline, before: now.figures });
  // What was searched for meanwhile is newer.
  if (answer === null || turn < now.searched) return null;
  if (answer.problems.length) { showFailed(answer.problems, false); return null; }
  const names = timeline ? STEP : STEP.filter((name) => name !== "timeline");
  const parts = names.map((name) => () => showPiece(answer.html, name));
  if (!await drawInTurn(parts, () => turn >= now.searched)) return null;
  showStale(["timeline"], !timeline);
  showStale(BESIDE, !timeline);
  showRun(answer);
  if (turn === now.turn) showReady();
  return answer;
}

// Shows the configuration of the form, compared with the recommended one.
async function showOwn(strategy) {
  pressLayout(-1);
  const answer = await estimate(strategy, now.change, true, now.asked.global_batch);
  if (answer) Object.assign(now, { layout: null, strategy });
}

async function choose(number) {
  pressLayout(number);
  const { name, strategy } = now.plan.layouts[number];
  const answer = await estimate(strategy, now.change);
  if (!answer) return;
  Object.assign(now, { figures: answer.figures, layout: number ? name : null, strategy });
  // The recommended one also has a command that plans it.
  if (!number) showRun(now.plan);
  keepAddress();
}

document.getElementById("layouts").addEventListener("click", (event) => {
  const button = event.target.closest("button.layout");
  if (button) choose(Number(button.dataset.layout)).catch(failed);
});

document.getElementById("answer").addEventListener("click", (event) => {
  const option = event.target.closest("button.option");
  if (option) setFields([...new URLSearchParams(option.dataset.fields)]);
});

try {
  catalogue = await (await fetch("catalogue.json")).json();
  fillForm(catalogue);
  planner = await connect(showStage);
  performance.mark("planner ready");
  watchForm((shown) => search(shown).catch(failed), () => outdate(true));
  await search(addressed());
  if (planner.runs) showRuns(await planner.runs());
} catch (error) {
  failed(error);
}
if ("serviceWorker" in navigator && document.querySelector('meta[name="shardwise-planner"]').content === "browser")
  navigator.serviceWorker.register("offline.js").catch(() => {});
