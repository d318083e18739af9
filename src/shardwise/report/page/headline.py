"""The top of a page: the verdict in a sentence, its evidence, and tiles with key figures."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from shardwise.planning.plan import Plan
from shardwise.planning.reasons.limits import OtherParallelism
from shardwise.planning.reasons.reason import speed_words
from shardwise.planning.reasons.settings import StepBatch
from shardwise.planning.rows import Candidate
from shardwise.predict.rates import comparison_error
from shardwise.report.adapter import adapter_words, profile_adapter_words
from shardwise.report.estimate_words import (
    NOTHING_FITS,
    changes_title,
    fitting_change_words,
    not_compared,
)
from shardwise.report.money import size_words
from shardwise.report.page.bars import badge
from shardwise.report.page.markup import Markup, element
from shardwise.report.page.subject import Subject
from shardwise.report.page.sweeps import best_by_value
from shardwise.report.plan_words import nearest_words, none_fits_words, step_words
from shardwise.spec.quantity import show_count, show_gb, show_gib, show_seconds
from shardwise.spec.strategy_words import configuration_words, run_words
from shardwise.step.comparison import Term, peak_memory, step_time
from shardwise.step.memory_words import memory_words, profile_memory_words, show_memory
from shardwise.step.profile import StepProfile
from shardwise.step.words import VERDICTS, comparison_words, signed_percent

_MOST_PROBLEMS = 3


class Headline(NamedTuple):
    """The verdict in a sentence, sentences of evidence, and a tone for its colour."""

    statement: str
    evidence: Sequence[str]
    tone: str = "plain"


def headline(subjects: Sequence[Subject]) -> Headline:
    """The verdict over all subjects of the page."""
    if len(subjects) > 1:
        return _comparison(subjects)
    one = subjects[0]
    if one.traced is not None:
        return _why_slow(one)
    if one.measured is not None:
        return _measured(one, one.measured)
    if one.plan is not None:
        return _plan(one)
    return _predicted(one)


def verdict(subjects: Sequence[Subject]) -> Markup:
    """The headline as an HTML box: the verdict, then its evidence."""
    found = headline(subjects)
    return element(
        "div",
        element("p", element("strong", found.statement)),
        [element("p", sentence) for sentence in found.evidence],
        class_=f"verdict {found.tone}",
    )


def _plan(one: Subject) -> Headline:
    """Headline of a plan: the recommended configuration, with warnings, speed and memory."""
    plan = one.plan
    assert plan is not None
    if plan.winner is None:
        return _nothing_fits(plan)
    winner = plan.winner
    compared = _gain_words(one, winner)
    told = [
        *_warning_words(plan),
        *compared,
        *_objective_words(plan),
        f"Step: {step_words(plan, winner)} (predicted)",
        *_batch_words(plan),
        memory_words(
            tensors=winner.peak_bytes,
            needed=winner.needed_bytes,
            usable=plan.limit_bytes,
            capacity=plan.problem.cluster.device.capacity,
        ),
        *(
            [f"Figures, memory, time and timeline below are of {one.name} as it is."]
            * bool(compared)
        ),
    ]
    seq_len, blocks = plan.problem.job.seq_len, plan.units.blocks
    what = configuration_words(winner.strategy, seq_len=seq_len, blocks=blocks)
    return Headline(f"Recommended: {what}.", told, "good")


def _gain_words(one: Subject, winner: Candidate) -> list[str]:
    """Sentence: speed of the plan against the run it started from; empty if both are equal."""
    run, profile = one.run, one.predicted
    if run is None or run.strategy == winner.strategy or profile is None or not profile.time:
        return []
    tokens = profile.throughput.tokens_per_s if profile.throughput else 0.0
    gain = winner.tokens_per_s / tokens - 1 if tokens else 0.0
    if abs(gain) <= comparison_error():
        told = f"The plan and {one.name} as it is are too close to call"
    else:
        told = f"The plan is {speed_words(gain)} than {one.name} as it is"
    return [f"{told}: {configuration_words(run.strategy)} (predicted)."]


def _warning_words(plan: Plan) -> list[str]:
    """The warnings of a plan as sentences."""
    return [one.words(plan.units.blocks) for one in plan.warnings]


def _objective_words(plan: Plan) -> list[str]:
    """Sentences on trained adapters, the objective and the number of devices, if not default."""
    told = []
    model = plan.problem.model
    if model.adapter is not None:
        units = plan.units.of(plan.problem.base.but(blocks_per_unit=1))
        mixture = plan.units.experts > 0
        told.append(adapter_words(model, units.trained_numel, units.numel, mixture=mixture))
    if plan.aim:
        told.append(plan.aim.words(plan.units.blocks))
    if plan.size_choice:
        told.append(size_words(plan.size_choice))
    return [sentence for sentence in told if sentence]


def _batch_words(plan: Plan) -> list[str]:
    """Sentences on the tokens per step."""
    return [reason.words() for reason in plan.why if isinstance(reason, StepBatch)]


def _nothing_fits(plan: Plan) -> Headline:
    """Headline of a plan without a winner: the closest configuration and what would help."""
    if plan.withheld:
        return Headline("No recommendation.", _warning_words(plan), "bad")
    told = [
        *_warning_words(plan),
        *_objective_words(plan),
        *([f"{nearest_words(plan)} (predicted)"] if plan.rejected else []),
    ]
    others = [tip for tip in plan.tips if isinstance(tip, OtherParallelism)]
    told += [tip.words(plan.units.blocks) for tip in plan.tips if tip not in others]
    if plan.ways:
        told.append(f"{changes_title(plan.ways, 'shardwise estimate', plan.for_stack)}:")
        told += map(fitting_change_words, plan.ways)
    elif len(others) == len(plan.tips):
        told.append(NOTHING_FITS)
    told += [tip.words() for tip in others]
    return Headline(none_fits_words(plan), told, "fair" if plan.at_risk else "bad")


def _predicted(one: Subject) -> Headline:
    """Headline of a prediction: whether it fits, memory and step time."""
    profile = one.predicted
    if profile is None or profile.memory is None:
        return Headline(one.name, [])
    said, tone = one.name, "plain"
    if profile.memory.verdict is not None:
        words = VERDICTS[profile.memory.verdict]
        said, tone = f"It {words.words}.", words.tone
    told = [f"{profile_memory_words(profile.memory)} ({profile.provenance.kind.capitalize()}.)"]
    if profile.time is not None:
        told.append(f"A step takes {show_seconds(profile.time.step_s)} (predicted).")
    if one.run is not None and one.run.adapter is not None:
        told.insert(0, profile_adapter_words(one.run.model, profile))
    if one.run is not None and profile.time is not None:
        told.append(not_compared(one.run.cluster).strip())
    return Headline(said, [sentence for sentence in told if sentence], tone)


def _measured(one: Subject, measured: StepProfile) -> Headline:
    """Headline of a measured run: seconds per step, with the prediction and its error."""
    said, tone = f"{one.name} ran", "plain"
    told = deviation_words(one)
    if measured.time is not None:
        said = f"A step took {show_seconds(measured.time.step_s)} (measured)"
        # The headline tells of the time.
        told = told[1:]
    time = step_time(one.predicted, measured)
    if time is not None and time.error is not None:
        tone = "good" if abs(time.error) < 0.1 else "fair"
        said += f"; {time.texts()[0]} was predicted ({signed_percent(time.error, 1)})"
    return Headline(f"{said}.", told, tone)


def deviation_words(one: Subject) -> list[str]:
    """At most two sentences, measured against predicted: step time, then peak memory."""
    time = step_time(one.predicted, one.measured)
    peak = peak_memory(one.predicted, one.measured)
    starts = {"An undisturbed step took": time, "Memory peaked at": peak}
    return [f"{start} {_term_words(term)}." for start, term in starts.items() if term is not None]


def _term_words(term: Term) -> str:
    """A measured value, then its prediction and error if there is one, as text."""
    guess, real = term.texts({"bytes": show_gib})
    error = (
        f", predicted {guess} ({signed_percent(term.error, 1)})" if term.error is not None else ""
    )
    return f"{real} (measured){error}"


def _why_slow(one: Subject) -> Headline:
    """Headline of traces: the main cause of lost time, its evidence and suggested fix."""
    traced = one.traced
    assert traced is not None
    health = traced.health
    # Problems of a trace come first: they affect every figure below.
    broken = [f"{r.path.name}: {told}." for r in traced.summary.ranks for told in r.problems]
    rest = [*broken[:_MOST_PROBLEMS], *deviation_words(one)]
    if not traced.verdicts:
        tone = "good" if health.healthy else "fair"
        return Headline(f"{health.words()} (measured)", rest, tone)
    first = traced.verdicts[0].explain(health)
    told = [f"{first.evidence} (measured)", f"Suggested fix: {first.fix}", *rest]
    return Headline(first.result, told, "fair")


def _comparison(subjects: Sequence[Subject]) -> Headline:
    """Headline of several subjects: the fastest of them, unless models or clusters differ."""
    models = {s.profile.model.get("name") for s in subjects if s.profile is not None}
    if len(models) > 1:
        return Headline(f"{len(models)} models, side by side; they are not ranked.", [])
    places = {s.profile.cluster.get("name") for s in subjects if s.profile is not None}
    if len(places) > 1:
        # Runs on different machines are not ranked.
        errors = _errors(subjects)
        said = [*best_by_value(subjects)]
        return Headline(errors or f"{len(subjects)} on {len(places)} clusters.", said, "plain")
    for kind in ("measured", "predicted"):
        timed = []
        for subject in subjects:
            profile: StepProfile | None = getattr(subject, kind)
            if profile is not None and profile.throughput is not None and profile.time is not None:
                timed.append((profile.throughput.tokens_per_s, subject, profile))
        if len(timed) > 1:
            timed.sort(key=lambda one: -one[0])
            return _fastest([(subject, profile) for _, subject, profile in timed], kind)
    return Headline(f"{len(subjects)} of them, side by side.", [])


def _fastest(ranked: list[tuple[Subject, StepProfile]], kind: str) -> Headline:
    """Headline that names the fastest of `ranked`, those too close to call, and the next.

    `ranked` is sorted by tokens/s, highest first. `kind` is "predicted" or "measured".
    """
    best, profile = ranked[0]
    alike = [s.name for s, p in ranked[1:] if _too_close(profile, p)]
    others = [(s, p) for s, p in ranked[1:] if not _too_close(profile, p)]
    said = f"{best.name} is fastest"
    if alike:
        more = f" and {len(alike) - 3} more" if len(alike) > 3 else ""
        said = f"Too close to call: {', '.join([best.name, *alike[:3]])}{more}"
    rates = profile.throughput
    assert rates is not None
    told = [f"{show_count(rates.tokens_per_s)} tokens/s ({kind})."]
    if alike and kind == "predicted":
        told.append(f"Their speeds are {comparison_words(comparison_error())}.")
    elif alike:
        told.append("The ranges of their steps overlap.")
    if others and others[0][1].throughput is not None:
        gain = rates.tokens_per_s / others[0][1].throughput.tokens_per_s - 1
        told.append(f"Next is {others[0][0].name}: the fastest has {gain:.0%} more ({kind}).")
        last = others[-1]
        if len(others) > 1 and last[1].throughput is not None:
            ratio = rates.tokens_per_s / last[1].throughput.tokens_per_s
            told.append(f"Last is {last[0].name}, {ratio:.1f} times slower ({kind}).")
    errors = _errors([subject for subject, _ in ranked])
    return Headline(f"{said} ({kind}).", [*told, errors] if errors else told, "good")


def _errors(subjects: Sequence[Subject]) -> str:
    """Sentence: median and largest error of predicted step times; empty without measured ones."""
    terms = [step_time(one.predicted, one.measured) for one in subjects]
    errors = [abs(term.error) for term in terms if term is not None and term.error is not None]
    if not errors:
        return ""
    return (
        f"Step times were predicted within {median(errors):.1%} (median of {len(errors)}, at most "
        f"{max(errors):.1%})."
    )


def _too_close(one: StepProfile, other: StepProfile) -> bool:
    """Whether two steps are too close to call, per token; false if they cannot be compared.

    Measured steps are compared by their spreads, predicted steps by the error of a comparison.
    """
    if one.time is None or other.time is None or one.work is None or other.work is None:
        return False
    scale = one.work.tokens / other.work.tokens
    if one.provenance.kind != "measured":
        # As in a plan: on one machine, two predictions share most of their error.
        ratio = one.time.step_s / (other.time.step_s * scale)
        return abs(ratio - 1) <= comparison_error()
    mine, theirs = one.time.step_s_spread, other.time.step_s_spread
    if mine is None or theirs is None:
        return False
    return mine[0] <= theirs[1] * scale and theirs[0] * scale <= mine[1]


# ---- tiles ----------------------------------------------------------------------------------


def figure_tiles(one: Subject) -> Markup | None:
    """HTML list of key figures: step time, throughput, MFU, memory, traffic; None without any."""
    found: list[Markup] = []

    def tile(name: str, value: str, kind: str, remark: str = "") -> None:
        found.append(
            element(
                "div",
                element("dt", name, badge(kind)),
                element("dd", value, element("small", remark) if remark else None),
                class_="tile",
            )
        )

    profile = one.profile
    if profile is not None:
        kind = profile.provenance.kind
        if profile.time is not None:
            tile("step", show_seconds(profile.time.step_s), kind)
        rates = profile.throughput
        if rates is not None:
            each = f"{rates.tokens_per_s_per_device:,.0f} per device"
            tile("tokens/s", show_count(rates.tokens_per_s), kind, each)
        if rates is not None and rates.mfu is not None:
            tile("MFU", f"{rates.mfu:.1%}", kind, "of the dense peak")
        if profile.memory is not None:
            memory = profile.memory
            tensors = show_memory(memory.peak_allocated_bytes)
            needed = show_memory(memory.needed_bytes or memory.peak_allocated_bytes)
            tile("memory", needed, kind, f"{tensors} tensors" * (needed != tensors))
        if profile.traffic:
            moved = sum(c.bytes for c in profile.traffic)
            calls = sum(c.calls for c in profile.traffic)
            tile("collectives", show_gb(moved), kind, f"{calls:,} calls a step")
    if one.traced is not None:
        health = one.traced.health
        tile("computing", f"{health.compute:.1%}", "measured", "of profiled steps")
        if health.overlap is not None:
            tile("overlap", f"{health.overlap:.1%}", "measured", "of communication hidden")
    return element("dl", found, class_="tiles") if found else None


def description_line(one: Subject) -> str:
    """One line about a subject: model, cluster and settings; or its number of traces."""
    profile = one.profile
    if profile is None:
        count = len(one.traced.summary.ranks) if one.traced else 0
        return f"traces of {count} rank{'s' if count != 1 else ''}"
    name, size = profile.model.get("name", ""), profile.model.get("parameters")
    what = f"{name} ({show_count(size)} parameters)" if size else str(name)
    where = profile.cluster.get("name") or f"{profile.cluster.get('devices', '?')} devices"
    return f"{what} on {where}" + (f" · {run_words(one.run)}" if one.run is not None else "")
