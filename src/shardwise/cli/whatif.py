"""`shardwise whatif`: what other hardware or another job would change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from shardwise.cli.options import DeadlineOption, PriceOption, TokensOption
from shardwise.cli.output import (
    CsvOption,
    Format,
    JsonOption,
    MarkdownOption,
    output_format,
    print_json,
    print_table,
)
from shardwise.cli.settings import takes
from shardwise.cli.values import number_or_word

if TYPE_CHECKING:
    from shardwise.planning.money import Budget
    from shardwise.planning.problem import Problem
    from shardwise.planning.threshold import Target, Threshold
    from shardwise.planning.whatif import Point


_Run = Annotated[Path | None, typer.Argument(help="A run.toml to start from.", show_default=False)]
_Vary = Annotated[
    list[str] | None,
    typer.Option(
        help="Values to compare: network=100,200,400 (Gbps), memory=40,80 (GiB), "
        "device=A100-80GB,H100-SXM, devices=8,64,512, seq-len=4096,8192 or "
        "global-batch=1M,4M. May be repeated."
    ),
]
_Least = Annotated[
    str | None,
    typer.Option(help="Find the least network, memory, devices or global-batch that meets --for."),
]
_Target = Annotated[
    str | None,
    typer.Option("--for", help="Target of --least: mfu=45%, step=10s, exposed=1% or days=30."),
]
_Fixed = Annotated[
    bool,
    typer.Option("--fixed", help="Keep one strategy instead of planning again at each value."),
]
_Strategy = Annotated[
    str | None, typer.Option(help="Strategy for --fixed; default: that of the run.toml.")
]
_MicroBatch = Annotated[
    int | None, typer.Option(help="Sequences per device and micro-batch, for --fixed.")
]
_Recompute = Annotated[
    str | None,
    typer.Option(
        help="Activation checkpointing for --fixed: none, selective, full, or a share of "
        "blocks such as 0.5."
    ),
]


@takes(*("model", "cluster", "seq_len", "global_batch", "optimizer", "adapter", "precision"),
       "software")  # fmt: skip
def whatif(
    run: _Run = None,
    vary: _Vary = None,
    least: _Least = None,
    target: _Target = None,
    fixed: _Fixed = False,
    strategy: _Strategy = None,
    micro_batch: _MicroBatch = None,
    recompute: _Recompute = None,
    tokens: TokensOption = None,
    price: PriceOption = None,
    deadline: DeadlineOption = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
    as_markdown: MarkdownOption = False,
    **settings: Any,
) -> None:
    """Compare other hardware or other jobs, or find the least that meets a target.

    Exits with 1 if no configuration fits, no value meets the target, or all miss the deadline.
    """
    from shardwise.planning.problem import Problem
    from shardwise.planning.threshold import find_threshold as find_least
    from shardwise.planning.whatif import study
    from shardwise.spec.question import describe_run
    from shardwise.spec.unequal import check_equal

    form = output_format(as_json, as_csv, as_markdown)
    of_fixed: dict[str, Any] = {
        "strategy": strategy,
        "micro_batch": micro_batch,
        "recompute": recompute,
    }
    loose = not fixed and any(of_fixed.values())
    asked = _read_asked(vary or [], least, target, loose, (tokens, price, deadline))
    of_fixed["recompute"] = number_or_word(recompute)
    described = describe_run(run=run, planned=not fixed, **of_fixed, **settings)
    check_equal(described, "whatif", "ask plan for each value instead")
    problem = Problem(described.model, described.cluster, described.job, described.strategy)
    kept = described.strategy if fixed else None
    answer = _Answer(
        problem,
        [(name, study(problem, name, values, kept)) for name, values in asked.vary],
        None if asked.target is None else find_least(problem, least or "", asked.target, kept),
        asked.budget.with_list_price(described.cluster),
    )
    for point in answer.points:
        answer.budget.price_of(point.problem.cluster.device.name)  # refuses one without a price
    _show(answer, form, fixed)
    if not answer.succeeds:
        raise typer.Exit(1)


class _Asked(NamedTuple):
    """What to compare or to find, and for which money and days."""

    vary: list[tuple[str, list[str]]]
    target: Target | None
    budget: Budget


def _read_asked(
    vary: list[str],
    least: str | None,
    target: str | None,
    loose: bool,
    budget: tuple[str | None, str | None, float | None],
) -> _Asked:
    """Read the options together; SpecError lists all problems.

    `loose` is whether a strategy is given without --fixed; `budget` is tokens, price and deadline.
    """
    from shardwise.planning.money import Budget, read_budget
    from shardwise.planning.threshold import parse_target
    from shardwise.spec.record import Problems

    problems, values = Problems(), []
    money, wanted = Budget(), None
    if loose:
        problems.found.append(
            "strategy: --strategy, --micro-batch and --recompute need --fixed; without it every "
            "value is planned again"
        )
    for text in vary:
        with problems.collect():
            values.append(_read_vary(text))
    if (least is None) != (target is None):
        problems.found.append(
            "least: give --least and --for together, such as --least network --for mfu=45%"
        )
    if not vary and least is None and target is None:
        problems.found.append("vary: give at least one, such as --vary network=100,200,400")
    with problems.collect():
        money = read_budget(*budget)
    with problems.collect():
        wanted = parse_target(target, money.tokens) if target is not None else None
    problems.raise_if_any()
    return _Asked(values, wanted, money)


class _Answer(NamedTuple):
    """The points of each varied quantity, and the least value that meets the target."""

    problem: Problem
    studies: list[tuple[str, list[Point]]]
    least: Threshold | None
    budget: Budget

    @property
    def points(self) -> list[Point]:
        """All points, that of the least value last."""
        least = [self.least.answer] if self.least and self.least.answer else []
        return [*(point for _, listed in self.studies for point in listed), *least]

    @property
    def misses_deadline(self) -> bool:
        """Whether some points fit and all that fit miss the deadline."""
        speeds = [point.candidate.tokens_per_s for point in self.points if point.candidate]
        return bool(speeds) and not any(self.budget.in_time(speed) for speed in speeds)

    @property
    def succeeds(self) -> bool:
        """Whether each quantity has a point that fits, and target and deadline are met."""
        nothing_fits = any(all(p.candidate is None for p in listed) for _, listed in self.studies)
        unmet = self.least is not None and not self.least.met
        return not (nothing_fits or self.misses_deadline or unmet)

    def to_dict(self, more: Threshold | None) -> dict[str, object]:
        """The answer as a JSON object; `more` are the devices that meet the deadline."""
        budget = self.budget
        return {
            "schema": 1,
            "kind": "predicted",
            "studies": [
                {"vary": name, "points": [point.to_dict(budget) for point in points]}
                for name, points in self.studies
            ],
            **({"least": self.least.to_dict(budget)} if self.least else {}),
            **({"deadline": more.to_dict(budget)} if more else {}),
            **({"list_price": budget.listed._asdict()} if budget.listed else {}),
        }


def _show(answer: _Answer, form: Format, fixed: bool) -> None:
    """Print the answer; on a screen with advice if the deadline is missed."""
    from shardwise.planning.threshold import devices_for_deadline
    from shardwise.report.whatif import studies_table

    budget, least = answer.budget, answer.least
    more = devices_for_deadline(answer.problem, budget) if answer.misses_deadline else None
    if form is Format.json:
        print_json(answer.to_dict(more))
    elif form is Format.screen:
        _print(answer, fixed, more)
    else:
        met = [(f"least {least.name}", [least.answer])] if least and least.answer else []
        print_table(studies_table([*answer.studies, *met], budget), form)


def _print(answer: _Answer, fixed: bool, more: Threshold | None) -> None:
    """Print the heading, each study, the least value, and advice on a missed deadline."""
    from shardwise.report.money import deadline_words
    from shardwise.report.screen import screen
    from shardwise.report.whatif import print_heading, print_study, print_threshold

    print_heading(answer.problem, fixed)
    for name, points in answer.studies:
        print_study(name, points, answer.budget)
    if answer.least is not None:
        print_threshold(answer.least, answer.problem, answer.budget)
    if more is not None:
        screen().print("\n" + deadline_words(more, answer.problem, answer.budget))


def _read_vary(text: str) -> tuple[str, list[str]]:
    """Parse `network=100,200` into a name and its values."""
    from shardwise.spec.record import SpecError

    name, _, values = text.partition("=")
    found = [value.strip() for value in values.split(",") if value.strip()]
    if not found:
        raise SpecError(f"vary: cannot read {text[:60]!r}; write it like network=100,200,400")
    return name.strip().lower().replace("_", "-"), found
