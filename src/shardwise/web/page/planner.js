// The planner's page: asks when the form rests, and shows the answer.
import { connect } from "./ask.js";
import { address, fillForm, question, watchForm } from "./form.js";
import { drawRun } from "./run.js";
import { pressLayout, showBusy, showNotes, showPieces, showProblems, showRuns, showStage, showStale } from "./show.js";
import { drawSliders } from "./whatif.js";

const PLAN = ["about", "verdict", "tiles", "cost", "changed", "memory", "why", "layouts", "time", "timeline", "front"];
const STEP = ["about", "verdict", "tiles", "changed", "memory", "time", "timeline"];
// What was asked last, what was answered, what sliders changed of it, and the figures that the
// next answer is compared with: those of the last one that somebody let stand.
const now = { asked: null, change: {}, plan: null, figures: undefined };
let planner = null, catalogue = null;

const withChange = (change) => ({ ...now.asked, change });

function failed(error) {
  showBusy(false);
  showStage(null);
  showProblems([String(error.message ?? error)]);
}

async function search(change = {}) {
  const fresh = Object.keys(change).length === 0;
  if (fresh) now.asked = question();
  showBusy(true);
  showStage("Searching for the best configuration");
  const answer = await planner.search({ ...withChange(change), before: now.figures });
  if (answer === null) return; // a newer question waits
  showBusy(false);
  showStage(null);
  showProblems(answer.problems);
  showNotes(answer.notes);
  if (answer.problems.length) return;
  Object.assign(now, { plan: answer, figures: answer.figures, change });
  showPieces(answer.html, PLAN);
  showStale("timeline", false);
  showCluster(answer);
  pressLayout(0);
  drawAround(answer, fresh);
  history.replaceState(null, "", address());
  planner.prepare();
}

function showCluster(answer) {
  document.getElementById("cluster-picture").innerHTML = answer.html.picture ?? "";
}

function drawAround(answer, fresh) {
  const runs = document.getElementById("run-section"), sliders = document.getElementById("whatif-section");
  runs.hidden = sliders.hidden = !answer.run;
  if (!answer.run) return;
  showRun(answer);
  if (fresh) {
    drawSliders(document.getElementById("sliders"), answer.at, {
      moved: (change) => estimate(now.plan.strategy, change, false).catch(failed),
      rested: (change) => search(change).catch(failed),
      curve: async (vary, values) => (await planner.search({ ...withChange({}), ask: "curve", vary, values }))?.html?.curve ?? "",
    });
  }
}

function showRun(answer) {
  const exported = (to) => planner.estimate({ ...withChange(now.change), ask: "export", strategy: answer.strategy, to });
  drawRun(document.getElementById("run"), answer, catalogue.stacks, exported);
}

// Shows one configuration; returns its figures. A timeline would not follow a slider.
async function estimate(strategy, change, timeline = true) {
  const asked = { ...withChange(change), ask: "estimate", strategy, timeline, before: now.figures };
  for (const name of ["objective", "exact_batch", "tokens", "price", "deadline", "for_stack", "global_batch"]) delete asked[name];
  const answer = await planner.estimate(asked);
  if (answer === null) return;
  showProblems(answer.problems);
  if (answer.problems.length) return;
  showPieces(answer.html, timeline ? STEP : STEP.filter((name) => name !== "timeline"));
  showStale("timeline", !timeline);
  showRun(answer);
  return answer.figures;
}

document.getElementById("layouts").addEventListener("click", (event) => {
  const button = event.target.closest("button.layout");
  if (!button) return;
  const number = Number(button.dataset.layout);
  pressLayout(number);
  estimate(now.plan.layouts[number].strategy, now.change)
    .then((figures) => { now.figures = figures ?? now.figures; }, failed);
});

try {
  catalogue = await (await fetch("catalogue.json")).json();
  fillForm(catalogue);
  planner = await connect(showStage);
  watchForm(() => search().catch(failed));
  await search();
  if (planner.runs) showRuns(await planner.runs());
} catch (error) {
  failed(error);
}
if ("serviceWorker" in navigator && document.querySelector('meta[name="shardwise-planner"]').content === "browser")
  navigator.serviceWorker.register("offline.js").catch(() => {});
