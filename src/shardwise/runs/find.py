"""Find the runs of a folder or bucket."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import NamedTuple

import msgspec

from shardwise.checkpoint.format.folder import find_store, is_remote
from shardwise.runs.record import NAME, SCHEMA, RunRecord, name_of
from shardwise.spec.read_file import read_bytes
from shardwise.spec.record import SpecError

# Patterns of run.json in a folder of runs: of runs, and of their replica groups.
_RUN_PATTERNS = (f"*/{NAME}", f"*/replica-*/{NAME}")


# Where `compare` and `tune` put the runs of each strategy or candidate (a contender).
_ROUNDS, _ROUND = "runs", "round-"


def round_folder(contender: Path, number: int) -> Path:
    """The folder of the short run `number`, counted from 1, of a contender."""
    return contender / _ROUNDS / f"{_ROUND}{number}"


def contender_of(run: Path) -> Path:
    """The folder of the contender that a run is a round of; else the folder of the run."""
    is_round = run.name.startswith(_ROUND) and run.parent.name == _ROUNDS
    return run.parent.parent if is_round else run


class FoundRuns(NamedTuple):
    """Runs, newest first, and a sentence for each file that could not be read."""

    runs: list[RunRecord]
    problems: list[str]


def find_runs(place: str, now: float | None = None) -> FoundRuns:
    """The runs in a folder or under a URL; raises SpecError if there is none.

    A run that trains but was not updated for LOST_AFTER_S before `now` is lost. `now` is in Unix
    seconds; None is the current time.
    """
    now = time.time() if now is None else now
    runs: list[RunRecord] = []
    problems: list[str] = []
    remote = is_remote(place)
    for url, data in _remote_files(place) if remote else _local_files(place, problems):
        try:
            record = msgspec.json.decode(data, type=RunRecord)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            problems.append(f"{url}: {error}")
            continue
        if record.schema == SCHEMA:
            # The folder may have been renamed.
            name = name_of(PurePath(url).parent) or record.name
            runs.append(msgspec.structs.replace(record.seen_at(now), name=name))
        else:
            problems.append(f"{url}: written by a newer version of Shardwise ({record.version})")
    if not runs and not problems:
        raise SpecError(
            f"runs: {place} has no runs (no */{NAME}); give the folder of train.folder, or the "
            "folder or URL of train.checkpoint.to"
        )
    return FoundRuns(sorted(runs, key=lambda run: run.started, reverse=True), problems)


def _local_files(place: str, problems: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of each run.json; add unreadable ones to `problems`."""
    folder = Path(place)
    if not folder.is_dir():
        raise SpecError(f"runs: folder {place} does not exist; give the folder of train.folder")
    # One run, or a folder of runs.
    is_run = (folder / NAME).is_file()
    for path in (
        [folder / NAME] if is_run else sorted(set().union(*map(folder.glob, _RUN_PATTERNS)))
    ):
        try:
            yield path.resolve().as_posix(), read_bytes(path, "runs")
        except SpecError as error:
            problems.append(str(error))


def _remote_files(place: str) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of each run.json under a URL."""
    store, prefix = find_store(place)
    store.invalidate_cache()
    try:
        paths = [path for one in _RUN_PATTERNS for path in store.glob(f"{prefix}/{one}")]
        paths = paths or store.glob(f"{prefix}/{NAME}")
        # All at once: a store answers many requests in the time of one.
        contents = store.cat(paths) if paths else {}
    except OSError as error:
        raise SpecError(f"runs: cannot read {place}: {error}") from None
    yield from sorted(contents.items()) if isinstance(contents, dict) else [(paths[0], contents)]
