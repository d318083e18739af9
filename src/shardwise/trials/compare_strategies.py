"""Benchmark strategies against each other with the same model, data, seed and tokens.

Every round runs each strategy once, in new processes and in a rotated order, so that other load on
the machine affects all of them alike. A strategy that fails is a result; the others continue.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from shardwise.runs.find import round_folder
from shardwise.spec.run import RunSpec, write_run
from shardwise.trainer.api import run_command


class NamedRun(NamedTuple):
    """A run to benchmark, and its name in the table."""

    name: str
    run: RunSpec


class Score(NamedTuple):
    """Measurements of one strategy; times are None where no round succeeded."""

    name: str
    # The median step of every round that succeeded.
    step_s: list[float]
    tokens_per_s: float | None
    predicted_s: float | None
    peak_bytes: int | None
    predicted_peak_bytes: int
    # The last line of the log of each failed round.
    failures: list[str]

    @property
    def median_s(self) -> float | None:
        """Median seconds per step over the rounds; None if no round succeeded."""
        return median(self.step_s) if self.step_s else None

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """Seconds per step of the fastest and the slowest round; None if no round succeeded."""
        return (min(self.step_s), max(self.step_s)) if self.step_s else None

    def overlaps(self, other: Score) -> bool:
        """Whether the ranges (fastest to slowest round) overlap: too close to call."""
        own, others = self.interval_s, other.interval_s
        if own is None or others is None:
            return False
        return own[0] <= others[1] and others[0] <= own[1]

    def to_dict(self) -> dict[str, Any]:
        """The score as `--json` prints it."""
        return {**self._asdict(), "median_s": self.median_s}


class Ranking(NamedTuple):
    """The fastest score, those too close to call, and the next slower one."""

    fastest: Score
    # Scores whose rounds overlap with those of the fastest.
    too_close: list[Score]
    next: Score | None
    # Median step of `next` over that of the fastest, minus 1.
    next_slower_by: float


def ranking(scores: Sequence[Score]) -> Ranking | None:
    """The result of a comparison; None where no strategy finished a round."""
    finished = [score for score in scores if score.step_s]
    if not finished:
        return None
    fastest, *others = sorted(finished, key=lambda score: median(score.step_s))
    close = [score for score in others if score.overlaps(fastest)]
    slower = [score for score in others if not score.overlaps(fastest)]
    if not slower:
        return Ranking(fastest, close, None, 0.0)
    ratio = median(slower[0].step_s) / median(fastest.step_s)
    return Ranking(fastest, close, slower[0], ratio - 1)


def compare_strategies(
    runs: Sequence[NamedRun],
    rounds: int,
    processes: int,
    folder: Path,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Score]:
    """Train every run in every round; return the scores, the fastest first.

    Runs that never finished come last. `folder` keeps every run; `progress` gets a line before
    each.
    """
    results: dict[str, list[dict[str, Any]]] = {one.name: [] for one in runs}
    failures: dict[str, list[str]] = {one.name: [] for one in runs}
    for number in range(rounds):
        # Rotate: each strategy runs first, second, … equally often.
        turn = number % len(runs)
        for one in [*runs[turn:], *runs[:turn]]:
            progress(f"round {number + 1} of {rounds}: {one.name}")
            result = run_once(one.run, processes, folder / one.name.replace("/", "-"), number)
            if isinstance(result, str):
                failures[one.name].append(result)
            else:
                results[one.name].append(result)
    scores = [_score(one.name, results[one.name], failures[one.name]) for one in runs]
    return sorted(scores, key=lambda score: score.median_s or float("inf"))


def run_once(
    run: RunSpec, processes: int, folder: Path, number: int, timeout_s: float | None = None
) -> dict[str, Any] | str:
    """Train `run` in new processes; return its JSON, or a line that says why it failed.

    `number` counts rounds from 0. After `timeout_s` all of its processes are killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    into = round_folder(folder, number + 1)
    file = folder / f"{into.name}.toml"
    assert run.train is not None
    settings = run.train.but(folder=str(into.parent))
    file.write_text(write_run(run._replace(train=settings)))
    words = ["train", str(file), "--json", "--nproc", str(processes)]
    log: list[str] = []
    ended = run_command([*words, "--name", into.name], log.append, timeout_s)
    if ended.timed_out:
        return f"killed: not finished after {timeout_s:.0f} s"
    (folder / f"{into.name}.log").write_text("".join(f"{line}\n" for line in log))
    try:
        result: dict[str, Any] = json.loads(ended.output)
        result["measured"]["time"]["step_s"]
    except (ValueError, KeyError):
        lines = [line for line in log if line.strip()]
        return lines[-1] if lines else f"exit code {ended.exit_code}"
    return result


def _score(name: str, results: list[dict[str, Any]], failures: list[str]) -> Score:
    """The score of a strategy from the JSON of its rounds that succeeded."""
    measured = [one["measured"] for one in results]
    predicted = results[0]["predicted"] if results else {}
    memories = [m["memory"]["peak_allocated_bytes"] for m in measured if "memory" in m]
    steps = [float(m["time"]["step_s"]) for m in measured]
    tokens = predicted.get("work", {}).get("tokens")
    return Score(
        name=name,
        step_s=steps,
        tokens_per_s=tokens / median(steps) if steps and tokens else None,
        predicted_s=predicted.get("time", {}).get("step_s"),
        peak_bytes=max(memories) if memories else None,
        predicted_peak_bytes=predicted.get("memory", {}).get("peak_allocated_bytes", 0),
        failures=failures,
    )
