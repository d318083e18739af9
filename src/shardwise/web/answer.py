"""Answer questions of the planner's page: the JSON of the command line, and pieces of HTML."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

from shardwise.planning.api import plan_run
from shardwise.planning.money import read_budget
from shardwise.planning.plan import Plan
from shardwise.planning.problem import Problem
from shardwise.planning.record import devices_in_time, plan_record
from shardwise.planning.vary import node_size, with_quantity
from shardwise.predict.api import estimate_run, replay_run
from shardwise.report.page.markup import element
from shardwise.report.page.subject import Subject
from shardwise.spec.quantity import GIB
from shardwise.spec.question import describe_run
from shardwise.spec.record import SpecError, SpecWarning
from shardwise.spec.run import RunSpec
from shardwise.spec.settings import FixedSettings
from shardwise.spec.strategy import Strategy
from shardwise.spec.strategy_words import blocks_of
from shardwise.step.spans import Timeline
from shardwise.web.changes import changed_words, figures_of
from shardwise.web.command import plan_command
from shardwise.web.curve import draw_curve
from shardwise.web.picture import cluster_picture
from shardwise.web.pieces import estimate_pieces, plan_pieces, planned_layouts
from shardwise.web.question import PASTED, Question, asked_model, read_question
from shardwise.web.start import start_of

# Most blocks times micro-batches of a step for which a timeline is simulated, in some seconds.
MOST_PASSES = 32_000
_INVALID = 2
# A slider offers at most this many times the devices asked for.
_MOST_TIMES = 64


def answer(text: str | bytes) -> str:
    """Answer the JSON text of a question; returns the answer as JSON text.

    `problems` has one sentence for each thing to change; an invalid question gets only `problems`,
    `exit_code` and `notes`. Otherwise `json` is what the command line prints, `exit_code` is its
    code, and `html` has the pieces of the page by name.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            question = read_question(text)
            found = _ANSWERS[question.ask](question)
        except SpecError as error:
            found = {"exit_code": _INVALID, "problems": error.problems}
    notes = [str(one.message) for one in caught if issubclass(one.category, SpecWarning)]
    return json.dumps({"problems": [], **found, "notes": notes}, allow_nan=False)


def _plan(question: Question) -> dict[str, Any]:
    """The answer to a "plan" question: the plan, pieces of HTML, figures, and how to start it."""
    asked = _settings(question)
    unmoved = describe_run(planned=True, **asked)
    if question.change:
        moved = _problem_after_change(question, unmoved)
        asked |= {"cluster": moved.cluster, "model": moved.model}
        asked |= moved.job.model_dump(exclude_none=True)
    stack = _lowercase(question.for_stack)
    found, chosen = plan_run(
        **asked,
        for_stack=stack,
        objective=question.objective,
        low_precision_reduce=question.low_precision_reduce,
        batch_tolerance=0.0 if question.exact_batch else None,
        budget=read_budget(question.tokens, question.price, question.deadline),
    )
    more = devices_in_time(found)
    profile = simulated = None
    not_drawn: dict[str, str] = {}
    if found.winner is not None and chosen is not None:
        profile = found.profile(found.winner)
        simulated, not_drawn = _timeline_of(chosen)
    subject = Subject(
        found.problem.model.name, "", chosen, profile, plan=found, simulated=simulated
    )
    figures = figures_of(profile)
    return {
        "exit_code": 0 if found.succeeds else 1,
        "json": _json_text(plan_record(found, stack, more)),
        "html": {
            **plan_pieces(subject, more),
            **not_drawn,
            "changed": changed_words(question.before, figures),
            "picture": str(cluster_picture(found.problem.cluster)),
        },
        "figures": figures,
        "at": _quantities(unmoved),
        "searched": _chosen_quantity(found),
        "layouts": planned_layouts(found),
        "command": plan_command(question),
        **start_of(chosen),
    }


def _estimate(question: Question) -> dict[str, Any]:
    """The answer to an "estimate" question: the prediction, pieces of HTML and figures."""
    run = _run_of(question)
    profile = estimate_run(run)
    simulated, not_drawn = _timeline_of(run) if question.timeline else (None, {})
    subject = Subject(run.model.name, "", run, profile, simulated=simulated)
    figures = figures_of(profile)
    budget = read_budget(question.tokens, question.price, question.deadline)
    budget = budget.with_list_price(run.cluster)
    pieces = estimate_pieces(subject, budget)
    return {
        "exit_code": 0 if profile.known_memory.fits else 1,
        "json": _json_text(profile.to_dict()),
        "html": {
            **pieces,
            **not_drawn,
            "changed": changed_words(question.before, figures),
        },
        "figures": figures,
        **start_of(run),
    }


def _curve(question: Question) -> dict[str, Any]:
    """The answer to a "curve" question: points and a chart over one varied quantity."""
    run = describe_run(planned=True, **_settings(question))
    problem = _problem_after_change(question, run)
    return draw_curve(problem, question.vary or "", question.values)


def _export(question: Question) -> dict[str, Any]:
    """The answer to an "export" question: the file for another stack."""
    from shardwise.stacks.write.exports import export_run

    run = _run_of(question)
    written = export_run(run, _lowercase(question.to) or "")
    return {"exit_code": 0, "export": written.to_dict()}


_ANSWERS: dict[str, Callable[[Question], dict[str, Any]]] = {
    "plan": _plan,
    "estimate": _estimate,
    "curve": _curve,
    "export": _export,
}


def _settings(question: Question) -> dict[str, Any]:
    """The settings of a question as keyword arguments of `describe_run`, without the strategy."""
    return {
        "model": asked_model(question),
        "cluster": question.cluster,
        "adapter": question.adapter,
        "seq_len": question.seq_len,
        "global_batch": question.global_batch,
        "optimizer": _lowercase(question.optimizer),
        "precision": _lowercase(question.precision),
        "software": _lowercase(question.software),
        "loss": _lowercase(question.loss),
        "states": _lowercase(question.states),
        "offload": _lowercase(question.offload),
        "compile": question.compile,
        "lookup": PASTED,
    }


def _problem_after_change(question: Question, run: RunSpec) -> Problem:
    """The problem of a run after the question's `change` of quantities."""
    problem = Problem(run.model, run.cluster, run.job, run.strategy)
    for name, value in question.change.items():
        problem, _ = with_quantity(problem, name, value)
    return problem


def _quantities(run: RunSpec) -> dict[str, float]:
    """Values of the sliders before they are moved: memory in GiB, network in Gbps.

    `node` is the number of devices of a full node, `most` the largest number of devices to try.
    """
    cluster = run.cluster
    found = {
        "memory": cluster.device.memory / GIB,
        "devices": cluster.devices,
        "seq-len": run.job.seq_len,
        # One node without a network cannot grow beyond a full node.
        "node": node_size(cluster),
        "most": cluster.devices * _MOST_TIMES if cluster.network else node_size(cluster),
    }
    if cluster.network is not None and cluster.nodes > 1:
        found["network"] = cluster.network * 8 / 1e9
    return found


def _chosen_quantity(plan: Plan) -> dict[str, str]:
    """The quantity that the search chose, as a `change` of the question; empty if none."""
    if plan.objective == "money":
        return {"devices": str(plan.problem.cluster.devices)}
    if plan.objective == "sequence":
        return {"seq-len": str(plan.problem.job.seq_len)}
    return {}


def _run_of(question: Question) -> RunSpec:
    """The run of the question: its `strategy`, on the cluster and job after its `change`."""
    asked = {**_settings(question), "micro_batch": question.micro_batch}
    asked["recompute"] = question.recompute
    given = question.strategy
    if not question.change and not isinstance(given, dict):
        return describe_run(strategy=given, **asked)
    run = describe_run(strategy=None if isinstance(given, dict) else given, planned=True, **asked)
    problem = _problem_after_change(question, run)
    cluster, strategy = problem.cluster, run.strategy
    if isinstance(given, dict):
        fixed = strategy.model_dump(include=set(FixedSettings.__annotations__))
        strategy = Strategy.read({**fixed, **given}, where="strategy")
    # Degrees fit only the cluster they were found for.
    if strategy.replicate is not None and strategy.devices != cluster.devices:
        strategy = strategy.unplaced()
    moved = run._replace(cluster=cluster, job=problem.job, strategy=strategy)
    return moved.resolved()


def _timeline_of(run: RunSpec) -> tuple[Timeline | None, dict[str, str]]:
    """The timeline of a step; None for a step too long to simulate, with an HTML piece on why."""
    micro_batches = run.strategy.accumulate
    if micro_batches * (blocks_of(run.model) or 1) <= MOST_PASSES:
        return replay_run(run), {}
    told = f"The timeline is not drawn: a step has {micro_batches:,} micro-batches."
    return None, {"timeline": str(element("p", told))}


def _json_text(record: dict[str, Any]) -> str:
    """The text that the command line prints with `--json`."""
    return json.dumps(record, indent=2, allow_nan=False)


def _lowercase(text: str | None) -> str | None:
    return None if text is None else text.lower()
