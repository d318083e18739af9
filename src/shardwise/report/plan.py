"""The screen of `shardwise plan`: recommendation, two bars, three reasons, layouts, next steps.

It takes at most 30 lines of 80 columns. `plan_explained.py` prints every reason and alternative.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from shardwise.planning.money import SizeChoice, SizedCandidate
from shardwise.planning.plan import Plan
from shardwise.planning.reasons.limits import (
    Alternative,
    CompileGain,
    LowPrecisionReduce,
    OtherParallelism,
)
from shardwise.planning.reasons.reason import Reason, compared_words, share_words
from shardwise.planning.reasons.settings import LargeBatch, StepBatch
from shardwise.planning.reasons.warnings import Fragile, UnquantizedExperts
from shardwise.planning.rows import Candidate
from shardwise.planning.threshold import Threshold
from shardwise.planning.ways import Change
from shardwise.report.adapter import adapter_words
from shardwise.report.bars import print_memory, print_step
from shardwise.report.estimate import print_ways
from shardwise.report.kernel_words import kernel_words, narrower_words
from shardwise.report.money import (
    cost_words,
    deadline_words,
    size_words,
    sizes_table,
    tokens_words,
)
from shardwise.report.plan_table import layouts_table
from shardwise.report.plan_words import (
    is_unchanged,
    nearest_words,
    none_fits_words,
    pace_words,
    planned_words,
    step_words,
    three_reasons,
    tie_break_words,
)
from shardwise.report.screen import bullet, heading, paragraph, screen, terminal_table
from shardwise.spec.strategy_words import (
    arithmetic_words,
    compile_words,
    method_words,
    package_words,
)
from shardwise.step.profile import StepProfile
from shardwise.step.words import COLOURS, VERDICTS

LINES = 30


class Detail(NamedTuple):
    """How much of each optional part of the screen is printed."""

    # Rows of the table of layouts; if no configuration fits, options that would help.
    rows: int
    reasons: int = 3
    # Whether a further option is printed, with its gain.
    option: bool = False
    # Whether an empty line stands before each part.
    gaps: bool = True
    # Whether a fragile plan has the option that needs less memory, if no other is printed.
    way_out: bool = True
    bars: bool = True


# Tried in this order until the screen has at most LINES lines.
_DETAIL_LEVELS = (
    *(Detail(rows, option=True) for rows in (4, 3, 2)),
    *(Detail(rows) for rows in (2, 1)),
    *(Detail(1, reasons, gaps=False) for reasons in (3, 2, 1)),
    *(Detail(0, 1, gaps=False, way_out=way_out) for way_out in (True, False)),
    *(Detail(rows, 1, gaps=False, way_out=False, bars=False) for rows in (1, 0)),
)
# Most characters of a command on the line of its sentence, and of a line of a wrapped command.
_SHORT, _COMMAND = 40, 68
_EXPLAIN_HINT = "--explain: all that would help"
_EXPLAIN = "--explain: all reasons, settings of every row, lower-memory options"


class Start(NamedTuple):
    """The commands that start the planned run."""

    command: str
    # The run.toml that was written; None where none was.
    written: str | None = None
    # The command that first writes another stack's file.
    export: str | None = None
    # A warning about what that stack does differently; empty for none.
    remark: str = ""


def print_plan(plan: Plan, start: Start, in_time: Threshold | None = None) -> None:
    """Print the plan in at most 30 lines of 80 columns.

    `in_time` is the search for the fewest devices that meet a deadline which the plan misses.
    """
    out = screen()
    profile = plan.profile(plan.winner) if plan.winner else None
    over = 0
    for room in _DETAIL_LEVELS:
        if room.option and _DETAIL_LEVELS[0].rows - room.rows < over:
            # A row less is at most a line less.
            continue
        with out.capture() as captured:
            print_question(out, plan)
            if plan.winner is None or profile is None:
                _print_nothing_fits(out, plan, room)
            else:
                _print_answer(out, plan, plan.winner, profile, room)
                _print_next(out, plan, start, in_time, room)
        answer = captured.get() if room.gaps else captured.get().replace("\n\n", "\n")
        over = over or answer.count("\n") - LINES
        if answer.count("\n") <= LINES:
            break
    out.file.write(answer)


def _print_answer(
    out: Console, plan: Plan, winner: Candidate, profile: StepProfile, room: Detail
) -> None:
    """Print the recommendation, reasons and layouts, as far as `room` allows."""
    print_recommended(out, plan, winner, profile, brief=True, bars=room.bars)
    heading(out, "Why this layout")
    for reason in three_reasons(plan)[: room.reasons]:
        bullet(out, reason.brief(plan.units.blocks))
    for tip in plan.tips:
        if isinstance(tip, OtherParallelism):
            bullet(out, tip.brief())
    if not room.rows:
        return
    if plan.size_choice is not None and plan.size_choice.sizes:
        print_sizes(out, plan, select_sizes(plan.size_choice, room.rows + 2))
    else:
        out.print()
        out.print(terminal_table(layouts_table(plan, room.rows, mark=False)))
    decided = tie_break_words(plan)
    if decided:
        paragraph(out, decided)


def _print_next(
    out: Console, plan: Plan, start: Start, in_time: Threshold | None, room: Detail
) -> None:
    """Print how to meet a missed deadline, how to start the run, and further options."""
    out.print()
    if in_time is not None:
        paragraph(out, deadline_words(in_time, plan.problem, plan.budget))
    first, others = "Next: ", " " * len("Next: ")
    kept = _option(plan) if room.way_out and _is_fragile(plan) else ()
    more = _more_options(plan) if room.option else kept
    for line in (*start_words(start), *more, _EXPLAIN):
        out.print(f"{first}{line}", soft_wrap=True)
        first = others


def print_question(out: Console, plan: Plan) -> None:
    """Print the model, the cluster, the assumed kernels, the objective and warnings."""
    problem = plan.problem
    out.print(
        Text(problem.model.name, style="bold")
        + Text(f" on {problem.cluster}, sequence length {problem.job.seq_len:,}, predicted")
    )
    kernels = kernel_words(problem.cluster)
    if kernels:
        paragraph(out, kernels)
    if problem.model.adapter is not None:
        units = plan.units.of(problem.base.but(blocks_per_unit=1))
        mixture = plan.units.experts > 0
        words = adapter_words(problem.model, units.trained_numel, units.numel, mixture=mixture)
        paragraph(out, words)
    if plan.aim:
        paragraph(out, plan.aim.words(plan.units.blocks))
    if plan.size_choice:
        paragraph(out, size_words(plan.size_choice))
    for warning in plan.warnings:
        if isinstance(warning, UnquantizedExperts):
            # The line about the adapter says where experts are stored.
            continue
        paragraph(out, warning.words(plan.units.blocks), "yellow")
    out.print()


def print_recommended(
    out: Console,
    plan: Plan,
    winner: Candidate,
    profile: StepProfile,
    *,
    brief: bool,
    bars: bool = True,
) -> None:
    """Print the recommended configuration, notes, step time and memory, as `bars` too.

    `brief` prints reasons and speed in their short form.
    """
    problem = plan.problem
    speed = pace_words(plan, winner) if brief else step_words(plan, winner)
    head = "Recommended (the current configuration)" if is_unchanged(plan) else "Recommended"
    paragraph(out, f"{head}: {planned_words(plan, winner.strategy)}", "bold green")
    for reason in plan.why:
        if is_batch(reason):
            paragraph(out, _reason_text(reason, brief))
    for note in (
        cost_words(plan.budget, winner.tokens_per_s, problem.cluster),
        method_words(problem.job, winner.strategy),
        *arithmetic_words(winner.strategy, problem.job.optimizer),
        package_words(winner.strategy),
        compile_words(winner.strategy, problem.model, problem.cluster),
    ):
        if note:
            paragraph(out, note)
    assert profile.time is not None
    print_step(out, f"Step: {speed}", profile.time, bars)
    print_memory(out, profile.known_memory, bars)


def _reason_text(reason: Reason, brief: bool) -> str:
    """The text of a reason, in its short form if `brief`."""
    return reason.brief() if brief else reason.words()


def is_batch(reason: Reason) -> bool:
    """Whether a reason is about the batch size, which is printed below the configuration."""
    return isinstance(reason, StepBatch | LargeBatch)


def print_sizes(out: Console, plan: Plan, sizes: list[SizedCandidate]) -> None:
    """Print a table of the cost of the budget's tokens by number of devices."""
    heading(out, f"Cost of {tokens_words(plan.budget)} by size")
    chosen = plan.problem.cluster.devices
    out.print(terminal_table(sizes_table(sizes, plan.budget, chosen)))


def select_sizes(choice: SizeChoice, most: int) -> list[SizedCandidate]:
    """At most `most` of the sizes, in their order.

    Kept first: the chosen, the cheapest and the largest; then those nearest to the chosen.
    """
    sizes = choice.sizes
    named = {sizes.index(one) for one in (choice.chosen, choice.cheapest, sizes[-1]) if one}
    at = sizes.index(choice.chosen) if choice.chosen else len(sizes) - 1
    nearest = sorted(range(len(sizes)), key=lambda index: abs(index - at))
    shown = [*named, *(index for index in nearest if index not in named)][:most]
    return [sizes[index] for index in sorted(shown)]


def start_words(start: Start) -> Iterator[str]:
    """Lines that say how to write the run.toml and how to start the run."""
    head = f"{start.written} is written" if start.written else "-o run.toml writes it"
    if len(start.command) < _SHORT and start.export is None:
        yield f"{head}; start it with: {start.command}"
        return
    yield f"{head}; then:{_export_suffix(head, start.export)}"
    if start.export and not _export_suffix(head, start.export):
        yield f"  {start.export}"
    yield from _command_lines(start.command)
    if start.remark:
        yield start.remark


def _export_suffix(head: str, command: str | None) -> str:
    """A space and the export command; empty if the line after `head` has no room for it."""
    return f" {command}" if command and len(head) + len(command) <= _COMMAND - 2 else ""


def _command_lines(command: str) -> list[str]:
    """A shell command wrapped into lines of a terminal, joined by backslashes."""
    lines = wrap(command, _COMMAND, break_long_words=False, break_on_hyphens=False)
    # Within quotes a line must not be broken.
    whole = [command] if "'" in command or '"' in command else lines
    return [f"  {line}{' ' + chr(92) if line is not whole[-1] else ''}" for line in whole]


def _more_options(plan: Plan) -> Iterator[str]:
    """Lines about options worth trying, and about `--measured` if it narrows the interval."""
    yield from _option(plan)
    if plan.narrower is not None:
        yield narrower_words(plan.narrower, plan.problem.cluster.level)


def _option(plan: Plan) -> Iterator[str]:
    """The option to try next, with its gain and the memory that it needs."""
    tips: dict[type[Reason], Reason] = {}
    for one in plan.tips:
        tips.setdefault(type(one), one)
    first = tips.get(Alternative) if _is_fragile(plan) else tips.get(CompileGain)
    match first or tips.get(Alternative) or tips.get(CompileGain) or tips.get(LowPrecisionReduce):
        case CompileGain(gain=gain, runs=runs):
            yield f"--compile: {share_words(gain)} faster (fitted on {runs} published runs)"
        case Alternative() as other:
            text = f"{other.asked}: {compared_words(other.throughput or 0.0)}, {other.needs}"
            yield from wrap(text, _COMMAND, subsequent_indent="  ", break_on_hyphens=False)
        case LowPrecisionReduce(dtype=dtype, gain=gain):
            faster = f"{share_words(gain)} faster; reduces gradients in {dtype}"
            yield f"--allow-low-precision-reduce: {faster}"


def _is_fragile(plan: Plan) -> bool:
    return any(isinstance(warning, Fragile) for warning in plan.warnings)


def _print_nothing_fits(out: Console, plan: Plan, room: Detail) -> None:
    """Print how much memory is missing, then what would make the run fit."""
    print_shortfall(out, plan, room.bars)
    if plan.withheld:
        return
    helpful = [tip for tip in plan.tips if not isinstance(tip, OtherParallelism)]
    # The first screen has room for all.
    shown = helpful if room is _DETAIL_LEVELS[0] else helpful[: room.rows]
    if shown:
        heading(out, "What would fit")
        for tip in shown:
            bullet(out, tip.brief(plan.units.blocks))
    # The last of the ways is more devices, which no tip suggests.
    print_changes(out, plan, plan.ways[-1:] if helpful else plan.ways, brief=True)
    if len(shown) < len(helpful):
        paragraph(out, _EXPLAIN_HINT)


def print_shortfall(out: Console, plan: Plan, bars: bool = True) -> None:
    """Print that no configuration fits, and the closest one; or that none is recommended."""
    if plan.withheld:
        out.print(Text("No recommendation.", style="bold red"))
        return
    tone = VERDICTS["at risk" if plan.at_risk else "does not fit"].tone
    out.print(Text(none_fits_words(plan), style=f"bold {COLOURS[tone]}"))
    if plan.rejected:
        nearest = plan.rejected[0]
        paragraph(out, nearest_words(plan))
        print_memory(out, plan.profile(nearest).known_memory, bars)


def print_changes(out: Console, plan: Plan, ways: Sequence[Change], *, brief: bool) -> None:
    """Print options that make the run fit, and parallelism that Shardwise does not run."""
    others = [tip for tip in plan.tips if isinstance(tip, OtherParallelism)]
    if ways or len(others) == len(plan.tips):
        out.print()
        print_ways(out, ways, "shardwise estimate", plan.for_stack)
    for tip in others:
        paragraph(out, _reason_text(tip, brief), "dim")
