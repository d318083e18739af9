"""Blocks that are alike are emitted once, wherever they are."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.predict.configurations import Configurations
from shardwise.predict.program.events import ROOT_UNIT, Program, Repeat, Run
from shardwise.predict.program.step import emit_steps
from shardwise.spec.question import describe_run
from shardwise.units.load import load_units


def test_blocks_that_alternate_share_their_events() -> None:
    # Every other block attends to a window, so no two neighbours are equal.
    run = describe_run("gpt-oss-20b", "8xH100-SXM", "zero3", seq_len=4096, accumulate=3)
    units = load_units(run.model, 4096, run.strategy)
    (part,) = emit_steps(units, Configurations.of([run.strategy])).parts
    forwards = [one for one in runs(part.program) if one.name == "forward"]
    blocks = [one for one in forwards if one.unit != ROOT_UNIT]
    assert len(blocks) == 3 * len(units.blocks) == 72
    # The first, two kinds, and the last, which has none to gather ahead.
    assert len({id(one) for one in blocks}) == 4


def runs(program: Program) -> Iterator[Run]:
    """The Runs of a program, those of a repeated body once."""
    for event in program:
        if isinstance(event, Repeat):
            yield from runs(event.body)
        elif isinstance(event, Run):
            yield event
