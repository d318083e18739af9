"""`shardwise runs`: list, compare and query past runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.output import (
    CsvOption,
    Format,
    JsonOption,
    MarkdownOption,
    output_format,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    from shardwise.runs.find import FoundRuns
    from shardwise.runs.record import RunRecord

# Most runs that 80 columns have room for.
MOST_COMPARED = 4


def runs(
    place: Annotated[
        str, typer.Argument(help="Folder of runs, or URL such as s3://bucket/runs.")
    ] = "runs",
    where: Annotated[
        list[str] | None,
        typer.Option(
            help="Condition on a key: 'loss<2.5', 'model=llama*', 'train.seed!=0'. Repeat it to "
            "add conditions.",
            show_default=False,
        ),
    ] = None,
    sort: Annotated[
        str, typer.Option(help="Key to sort by; with a minus before it, largest first.")
    ] = "-started",
    show: Annotated[
        str | None, typer.Option(help="More columns: keys, separated by commas.")
    ] = None,
    last: Annotated[int | None, typer.Option(min=1, help="Most runs to show.")] = None,
    compare: Annotated[
        str | None, typer.Option(help="Compare these runs: names, separated by commas.")
    ] = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
    as_markdown: MarkdownOption = False,
) -> None:
    """List, compare and query past and present runs of a folder or bucket.

    Reads run.json of each run. Keys are those of that file, the last values of metrics.jsonl and
    settings such as strategy.kind; --json shows all. Exits with 1 if no run meets the conditions.
    """
    from shardwise.report.runs import print_runs, runs_table
    from shardwise.runs.find import find_runs

    form = output_format(as_json, as_csv, as_markdown)
    found = find_runs(place)
    if compare is not None:
        _compare(found.runs, compare, form)
        return
    extra = [key.strip() for key in show.split(",") if key.strip()] if show else []
    chosen = _matching_runs(found, where or [], sort, extra)[:last]
    if form is Format.json:
        print_json({"schema": 1, "runs": [run.flat() for run in chosen]})
    elif form is Format.screen:
        print_runs(chosen, len(found.runs), place, found.problems, extra)
    else:
        print_table(runs_table(chosen, extra), form)
    if not chosen:
        raise typer.Exit(1)


def _matching_runs(
    found: FoundRuns, where: list[str], sort: str, extra: list[str]
) -> list[RunRecord]:
    """The runs that meet all conditions of `where`, sorted by `sort`.

    SpecError for unknown keys, also in `extra`.
    """
    from shardwise.runs.query import check_keys, read_conditions, sort_runs

    conditions = read_conditions(where)
    check_keys("--where", (condition.key for condition in conditions), found.runs)
    check_keys("--sort", [sort.removeprefix("-")], found.runs)
    check_keys("--show", extra, found.runs)
    matching = [run for run in found.runs if all(one.holds(run) for one in conditions)]
    return sort_runs(matching, sort)


def _compare(found: list[RunRecord], names: str, form: Format) -> None:
    """Print the runs with these names, separated by commas, side by side."""
    from shardwise.report.runs import comparison_table, print_comparison
    from shardwise.runs.compare import choose_runs, compare_runs
    from shardwise.spec.record import SpecError

    wanted = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    if len(wanted) < 2:
        raise SpecError("--compare: name at least two runs, such as --compare first,second")
    if len(wanted) > MOST_COMPARED and form is Format.screen:
        raise SpecError(
            f"--compare: a screen has room for {MOST_COMPARED} runs; name fewer, or add --csv or "
            "--markdown"
        )
    compared = compare_runs(choose_runs(found, wanted))
    if form is Format.json:
        rows = [*compared.settings, *compared.results]
        table = {row.key: dict(zip(wanted, row.values, strict=True)) for row in rows}
        known = {
            key: {name: value for name, value in values.items() if value is not None}
            for key, values in table.items()
        }
        print_json({"schema": 1, "runs": wanted, "compared": known})
    elif form is Format.screen:
        print_comparison(compared)
    else:
        print_table(comparison_table(compared), form)
