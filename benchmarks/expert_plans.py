"""Plans of mixtures of experts, and the published degree of experts, beside published layouts.

    python -m benchmarks.expert_plans [--write]

Facts, sources and reasons are in published_mixtures.toml; pipelines are not planned. `--write` puts
the table into docs/accuracy-experts.md.
"""

from __future__ import annotations

import argparse
import sys
import time
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.experts import write
from shardwise.planning.problem import Problem
from shardwise.planning.rows import Candidate
from shardwise.planning.search import Search
from shardwise.planning.space import Space
from shardwise.spec.question import describe_run
from shardwise.spec.strategy import Strategy

FACTS = Path(__file__).with_name("published_mixtures.toml")
BEGIN, END = "<!-- plans: written by python -m benchmarks.expert_plans -->", "<!-- end of plans -->"
SEQ_LEN = 4096
DISPATCHERS = {"all-to-all": "all-to-all", "deepep": "DeepEP", "hybridep": "HybridEP"}
HEADER = """\
| job | published | tokens/s a GPU | dispatch | plan | tokens/s a GPU | at their degree | why |
|---|---|--:|---|---|--:|---|---|
"""


class Found(NamedTuple):
    """The best configuration, and the seconds of CPU that its search took."""

    best: Candidate | None
    seconds: float


def read_runs() -> list[dict[str, Any]]:
    """The published runs, in the order of the file."""
    return list(tomllib.loads(FACTS.read_text(encoding="utf-8"))["run"])


def search(run: dict[str, Any], degree: int | None = None) -> Found:
    """The fastest that fits, of all degrees of experts or of one; no tensor, no context.

    Tokens travel as in the published run.
    """
    tokens = run["sequences"] * SEQ_LEN
    start = time.process_time()
    described = describe_run(
        run["model"],
        run["cluster"],
        seq_len=SEQ_LEN,
        global_batch=tokens,
        planned=True,
        dispatch=run["dispatch"],
    )
    problem = Problem(described.model, described.cluster, described.job, described.strategy)
    space = Space(tensor=(1,), context=(1,))
    if degree is not None:
        allowed = partial(_has_degree, degree)
        space = space._replace(expert=(degree,), allowed=allowed)
    best = Search(problem, space).run().best()
    return Found(best, time.process_time() - start)


def _has_degree(degree: int, strategy: Strategy) -> bool:
    return strategy.expert == degree


def rows() -> Iterator[str]:
    """A row of the table for each run; the time of each search goes to the terminal."""
    for run in read_runs():
        found, same = search(run), search(run, run["published_expert"])
        print(f"{run['name']}, {run['cluster']}: {found.seconds:.2f} s of CPU", file=sys.stderr)
        job = f'[{run["name"]}]({run["url"]} "{run["source"]}"), {run["cluster"]}'
        published = f"{run['tokens']:,}" if "tokens" in run else ""
        cells = [
            job,
            run["layout"],
            published,
            DISPATCHERS[run["dispatch"]],
            _words(found),
            _speed(found),
            _relative(same, found),
        ]
        yield f"| {' | '.join(cells)} | {run['why']} |"


def _words(found: Found) -> str:
    if found.best is None:
        return "does not fit"
    strategy = found.best.strategy
    recompute = strategy.recompute if isinstance(strategy.recompute, str) else "partial"
    return f"`{strategy.shorthand}`, recompute {recompute}"


def _speed(found: Found) -> str:
    if found.best is None:
        return ""
    return f"{found.best.tokens_per_s / found.best.strategy.devices:,.0f}"


def _relative(same: Found, found: Found) -> str:
    """How fast the published degree of experts is, relative to the plan."""
    if same.best is None or found.best is None:
        return "does not fit"
    if same.best.strategy.expert != 1 and same.best.strategy.expert == found.best.strategy.expert:
        return "the same"
    return f"{same.best.tokens_per_s / found.best.tokens_per_s - 1:+.0%}".replace("%", " %")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/accuracy-experts.md")
    options = parser.parse_args()
    text = HEADER + "\n".join(rows())
    if options.write:
        write(text, BEGIN, END)
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
