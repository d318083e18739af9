"""Benchmark strategies against each other with the same model, data, seed and tokens.

Every round runs each strategy once, in new processes and in a rotated order, so that other load on
the machine affects all of them alike. A strategy that fails is a result; the others continue.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from shardwise.spec.run import RunSpec, write_run
from shardwise.train.launch import FOLDER, kill_tree


class Contender(NamedTuple):
    """A run to benchmark, and its name in the table."""

    name: str
    run: RunSpec


class Score(NamedTuple):
    """Measurements of one contender; times are None where no round succeeded."""

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
        return median(self.step_s) if self.step_s else None

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """The fastest and the slowest round."""
        return (min(self.step_s), max(self.step_s)) if self.step_s else None

    def indistinguishable_from(self, other: Score) -> bool:
        """Whether the ranges of rounds overlap."""
        mine, theirs = self.interval_s, other.interval_s
        if mine is None or theirs is None:
            return False
        return mine[0] <= theirs[1] and theirs[0] <= mine[1]

    def to_dict(self) -> dict[str, Any]:
        """The score as `--json` prints it."""
        return {**self._asdict(), "median_s": self.median_s}


class Ranking(NamedTuple):
    """Who is fastest, who is too close to call, and how much slower the next one is."""

    fastest: Score
    indistinguishable: list[Score]
    next: Score | None
    # Median step of `next` over that of the fastest, minus 1.
    next_slower_by: float


def ranking(scores: Sequence[Score]) -> Ranking | None:
    """The result of a comparison; None where no strategy finished a round."""
    finished = [score for score in scores if score.step_s]
    if not finished:
        return None
    fastest, *others = sorted(finished, key=lambda score: median(score.step_s))
    close = [score for score in others if score.indistinguishable_from(fastest)]
    slower = [score for score in others if not score.indistinguishable_from(fastest)]
    if not slower:
        return Ranking(fastest, close, None, 0.0)
    ratio = median(slower[0].step_s) / median(fastest.step_s)
    return Ranking(fastest, close, slower[0], ratio - 1)


def contest(
    contenders: Sequence[Contender],
    rounds: int,
    processes: int,
    folder: Path,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Score]:
    """Run all rounds; scores are sorted, the fastest first, those that never finished last.

    `folder` keeps every run; `progress` gets a line before each.
    """
    results: dict[str, list[dict[str, Any]]] = {one.name: [] for one in contenders}
    failures: dict[str, list[str]] = {one.name: [] for one in contenders}
    for number in range(rounds):
        # Rotate: each contender runs first, second, … equally often.
        turn = number % len(contenders)
        for one in [*contenders[turn:], *contenders[:turn]]:
            progress(f"round {number + 1} of {rounds}: {one.name}")
            found = run_once(one.run, processes, folder / one.name.replace("/", "-"), number)
            if isinstance(found, str):
                failures[one.name].append(found)
            else:
                results[one.name].append(found)
    scores = [_score(one.name, results[one.name], failures[one.name]) for one in contenders]
    return sorted(scores, key=lambda score: score.median_s or float("inf"))


def run_once(
    run: RunSpec, processes: int, folder: Path, number: int, timeout_s: float | None = None
) -> dict[str, Any] | str:
    """Train `run` in new processes and return its JSON, or the last line of its log if it failed.

    After `timeout_s` all of its processes are killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"round-{number + 1}.toml"
    assert run.train is not None
    settings = run.train.but(folder=str(folder / "runs"))
    file.write_text(write_run(run._replace(train=settings)))
    environment = {k: v for k, v in os.environ.items() if k not in (FOLDER, "RANK", "WORLD_SIZE")}
    with subprocess.Popen(
        [sys.executable, "-m", "shardwise", "train", str(file), "--json",
         "--nproc", str(processes), "--name", f"round-{number + 1}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    ) as process:  # fmt: skip
        try:
            output, log = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
            process.communicate()
            return f"killed: not finished after {timeout_s:.0f} s"
        except BaseException:
            kill_tree(process.pid)
            raise
    (folder / f"round-{number + 1}.log").write_text(log)
    try:
        found: dict[str, Any] = json.loads(output)
        found["measured"]["time"]["step_s"]
    except (ValueError, KeyError):
        lines = log.strip().splitlines()
        return lines[-1] if lines else f"exit code {process.returncode}"
    return found


def _score(name: str, results: list[dict[str, Any]], failures: list[str]) -> Score:
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
