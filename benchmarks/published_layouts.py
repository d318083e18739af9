"""What a plan chooses for published runs, beside the layout that was published.

    python benchmarks/published_layouts.py [--write]

Facts, sources and the reasons of differences are in published_layouts.toml; the rest is planned
anew. `--write` puts the table into docs/how-to/when-fsdp-is-not-enough.md.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.planning.make import make_plan
from shardwise.planning.price import mfu_of
from shardwise.planning.problem import Problem, Units
from shardwise.planning.rows import Candidate
from shardwise.planning.search import Search
from shardwise.planning.space import Space
from shardwise.spec.model import ModelSpec
from shardwise.spec.question import describe_run
from shardwise.spec.record import SpecError

FACTS = Path(__file__).with_name("published_layouts.toml")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "when-fsdp-is-not-enough.md"
SECTION = re.compile(r"(?<=<!-- published layouts -->\n).*?(?=<!-- end -->)", re.DOTALL)
HEADER = (
    "| run | published | MFU | our plan | MFU, predicted | their degrees, no pipeline | why |\n"
    "|---|---|---|---|---|---|---|\n"
)
# Throughputs closer than this are the same to a prediction.
CLOSE = 0.01


class Published(NamedTuple):
    """A published run: its job, its layout, and why a plan differs."""

    name: str
    cluster: str
    seq_len: int
    # Of one optimizer step.
    sequences: int
    data: int
    why: str
    source: str
    url: str
    # A preset, or a shape. None if it cannot be planned.
    model: str | dict[str, Any] | None = None
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    mfu: float | None = None

    @property
    def devices(self) -> int:
        nodes, per_node = re.match(r"(?:(\d+)x)?(\d+)x", self.cluster).groups()  # type: ignore[union-attr]
        return int(nodes or 1) * int(per_node)

    @property
    def tokens(self) -> int:
        return self.sequences * self.seq_len


class Answer(NamedTuple):
    """What a plan says about a published run. Throughputs are relative to the plan's choice."""

    chosen: Candidate | None
    mfu: float | None = None
    # Of the best with the published degrees of tensor and context parallelism.
    published: float | None = None


def read_runs() -> list[Published]:
    """The published runs, in the order of the file."""
    return [Published(**run) for run in tomllib.loads(FACTS.read_text(encoding="utf-8"))["run"]]


def answer(run: Published) -> Answer:
    """Plan a published run, and price its own degrees without its pipeline."""
    if run.model is None:
        return Answer(None)
    problem = _problem(run)
    chosen = _plan(problem)
    if chosen is None:
        return Answer(None)
    same = _published(run, problem)
    relative = same.tokens_per_s / chosen.tokens_per_s - 1 if same else None
    return Answer(chosen, mfu_of(problem, Units(problem), chosen), relative)


def _plan(problem: Problem) -> Candidate | None:
    """The choice for exactly the published batch, or the closest that all devices share."""
    try:
        exact = make_plan(problem, space=Space(batch_tolerance=0)).winner
    except SpecError:
        exact = None
    if exact is not None and exact.strategy.devices == problem.cluster.devices:
        return exact
    return make_plan(problem).winner


def _published(run: Published, problem: Problem) -> Candidate | None:
    """The best with the published degrees of tensor and context parallelism."""
    degrees = (run.tensor, run.context)
    space = Space(
        tensor=(run.tensor,),
        context=(run.context,),
        allowed=lambda strategy: (strategy.tensor, strategy.context) == degrees,
    )
    try:
        return Search(problem, space).run().best()
    except SpecError:
        # Such as a family that is not divided.
        return None


def _problem(run: Published) -> Problem:
    model = ModelSpec.read(run.model, where="model") if isinstance(run.model, dict) else run.model
    described = describe_run(
        model, run.cluster, seq_len=run.seq_len, global_batch=run.tokens, planned=True
    )
    return Problem(described.model, described.cluster, described.job, described.strategy)


# ---- the table ------------------------------------------------------------------------------


def table() -> str:
    """All runs as a Markdown table."""
    return HEADER + "".join(_row(run, answer(run)) for run in read_runs())


def _row(run: Published, found: Answer) -> str:
    job = f"{run.devices:,} GPUs, {run.sequences:,} × {run.seq_len:,} tokens"
    cells = [
        f'[{run.name}]({run.url} "{run.source}"): {job}',
        published_layout(run),
        f"{run.mfu:.0f} %" if run.mfu else "",
        _chosen(run, found),
        f"{found.mfu:.0%}".replace("%", " %") if found.mfu else "",
        _relative(run, found),
        run.why,
    ]
    return f"| {' | '.join(cells)} |\n"


def _chosen(run: Published, found: Answer) -> str:
    if found.chosen is None:
        return "not planned" if run.model is None else "does not fit"
    return f"`{found.chosen.strategy.shorthand}`"


def published_layout(run: Published) -> str:
    """The published degrees in words: "tensor 8, pipeline 16, data 128"."""
    degrees = {
        "tensor": run.tensor,
        "context": run.context,
        "pipeline": run.pipeline,
        "expert": run.expert,
        "data": run.data,
    }
    return ", ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)


def _relative(run: Published, found: Answer) -> str:
    if found.chosen is None:
        return ""
    if found.published is None:
        return "not divided"
    if abs(found.published) < CLOSE:
        return "the same speed"
    speed = "faster" if found.published > 0 else "slower"
    return f"{abs(found.published):.0%} {speed}".replace("%", " %")


def write(page: Path, text: str) -> None:
    """Put the table between the marks of a page."""
    old = page.read_text(encoding="utf-8")
    page.write_text(SECTION.sub(lambda _: text, old), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into its page")
    options = parser.parse_args()
    text = table()
    if options.write:
        write(PAGE, text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
