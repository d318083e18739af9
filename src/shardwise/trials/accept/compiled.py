"""Compile: blocks under torch.compile train the same and communicate the same."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwise.trials.accept import workload
from shardwise.trials.accept.collectives import counted_as_predicted
from shardwise.trials.accept.line import Line, judge, not_run

if TYPE_CHECKING:
    from shardwise.trials.accept.bench import Bench

LOSS, TRAFFIC = "last loss", "collectives"
PLAIN = "as without"
# Relative difference of the last loss: compiled kernels round in another order.
MAX_DIFFERENCE_ON_CPU, MAX_DIFFERENCE_ON_GPU = 1e-4, 2e-2
COMPILERS = ("g++", "clang++", "c++")


def check_compiled(bench: Bench) -> Iterator[Line]:
    """Compare loss and collectives of the sharded layout with and without torch.compile."""
    is_cpu, processes = bench.machine.is_cpu, bench.machine.processes
    limit = MAX_DIFFERENCE_ON_CPU if is_cpu else MAX_DIFFERENCE_ON_GPU
    within = f"{PLAIN} ± {limit:.0e}"
    if is_cpu and not any(map(shutil.which, COMPILERS)):
        yield not_run(LOSS, within, f"no C++ compiler found ({', '.join(COMPILERS)})")
        return
    layout = workload.sharded(processes)
    plain = bench.trained(str(layout["kind"]), layout)
    compiled = bench.trained("compiled", {**layout, "compile": True})
    difference = abs(compiled.last_loss / plain.last_loss - 1)
    seen = f"{compiled.last_loss:.5f} ({difference:+.0e})"
    passed = difference <= limit
    yield judge(LOSS, within, seen, passed, "compiled blocks learn another", difference=difference)
    if processes > 1:
        yield counted_as_predicted(TRAFFIC, compiled.predicted, compiled.measured)
    else:
        yield not_run(TRAFFIC, "as predicted", "one device sends nothing")
