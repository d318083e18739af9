"""`shardwise contribute`: write what a run measured, beside its prediction, as one small file."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.output import JsonOption, check_output
from shardwise.spec.foreign_text import echo, one_line

if TYPE_CHECKING:
    from shardwise.runs.contribution.record import Contribution


_Run = Annotated[
    Path,
    typer.Argument(
        help="Folder of a finished run, or the file that accept wrote.", show_default=False
    ),
]


def contribute(
    run: _Run,
    output: Annotated[Path, typer.Option("--output", "-o", help="The JSON file to write.")] = Path(
        "contribution.json"
    ),
    yes: Annotated[bool, typer.Option("--yes", help="Write the file without asking.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write what a run measured, beside its prediction, as one small file. Nothing is sent.

    The file holds hardware, versions, layout, shapes, step time, memory and collectives: numbers,
    words of fixed lists and version numbers. No name, path, host, data or text of yours is in it.
    It is shown in full before it is written. --json shows it only. Exits with 1 if you decline.
    """
    import json

    from shardwise.runs.contribution.collect import collect_all
    from shardwise.spec.record import SpecError

    check_output(output, ".json")
    found = collect_all(run)
    paths = {name: output.with_stem(f"{output.stem}-{name}") if name else output for name in found}
    for path in paths.values():
        _check_replaceable(path)
    records = [one.to_dict() for one in found.values()]
    shown = records[0] if len(records) == 1 else records
    echo(json.dumps(shown, indent=2, allow_nan=False))
    # Only the run of a folder has the empty name; `accept` has withheld its unsteady runs already.
    unsteady = _unsteady_words(found[""]) if "" in found else ""
    if unsteady:
        echo(f"\n{unsteady}", err=True)
    names = ", ".join(str(path) for path in paths.values())
    if as_json and not yes:
        return
    if yes and unsteady:
        raise SpecError("contribute: nothing is written of an unsteady run with --yes; train again")
    if not yes:
        if not sys.stdin.isatty():
            raise SpecError("contribute: nothing is written without a terminal to ask; add --yes")
        if not typer.confirm(f"\nWrite this to {one_line(names)}?", err=True):
            echo("Nothing was written.", err=True)
            raise typer.Exit(1)
    _write_all(dict(zip(paths.values(), records, strict=True)))
    echo(
        f"\nWritten to {names}. Nothing was sent. To contribute it, open a pull request that adds "
        "it to benchmarks/measured/runs/SOURCE/.",
        err=True,
    )


def _check_replaceable(path: Path) -> None:
    """Raise SpecError unless the path is a new .json file or an earlier contribution."""
    from shardwise.runs.contribution.record import KIND
    from shardwise.spec.read_file import read_json
    from shardwise.spec.record import SpecError

    check_output(path, ".json")
    if path.suffix != ".json":
        raise SpecError(f"output: {path} is not a .json file; give another path")
    if not path.exists():
        return
    try:
        data = read_json(path, "contribute")
    except SpecError:
        data = None
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise SpecError(f"output: {path} exists and is no contribution; give another path")


def _unsteady_words(one: Contribution) -> str:
    """Sentence: the steps of a run are too uneven to contribute; empty for a steady run.

    A run folder does not record what else ran. `accept` withholds runs during which other processes
    used more than MAX_BUSY of the cores; likewise, slow steps may exceed the median by MAX_BUSY.
    """
    from shardwise.spec.quantity import show_seconds
    from shardwise.trials.accept.machine import MAX_BUSY

    time = one.measured.time
    if time is None or time.step_s_spread is None:
        return ""
    low, high = time.step_s_spread
    if high <= (1 + MAX_BUSY) * time.step_s:
        return ""
    return (
        f"Steps took {show_seconds(low)} to {show_seconds(high)}: too uneven to be evidence. Train "
        "again on a machine that does nothing else."
    )


def _write_all(files: Mapping[Path, object]) -> None:
    """Write each record as JSON to its path: all files or none."""
    import json

    from shardwise.spec.record import SpecError

    drafts = {path: path.with_name(f".{path.name}.part") for path in files}
    try:
        for path, record in files.items():
            text = json.dumps(record, indent=2, allow_nan=False) + "\n"
            drafts[path].write_text(text, encoding="utf-8")
        for path, draft in drafts.items():
            draft.replace(path)
    except OSError as error:
        raise SpecError(f"output: cannot write {error.filename}: {error.strerror}") from None
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)
