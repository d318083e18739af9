"""Synthetic traces of FSDP2 on GPUs, in Kineto's format, with known truth.

No real one is at hand. Ranks share a clock here and are written with offsets; a collective ends on
all of them at once, however late one arrives. Whole microseconds throughout, so that a sweep over
single microseconds can tell the truth without any arithmetic on intervals.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

COMPUTE, GATHER, SCATTER = 7, 20, 24  # streams
LAUNCH = 2  # microseconds a launch takes on the host


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to build; times in microseconds, `late` per step by rank."""

    ranks: int = 1
    blocks: int = 16
    steps: int = 3
    micro_batches: int = 1
    forward: int = 1000
    backward: int = 2000
    optimizer: int = 1000
    gather: int = 100
    scatter: int = 100
    prefetched: bool = True
    separate: bool = True
    # Before every kernel the host takes this long, and nothing is queued.
    host_gap: int = 0
    # Once a step, before its first kernel.
    data: int = 0
    malloc: int = 0
    limiter: int = 0
    # The host waits for the device at the end of a step and takes this long to launch again.
    synchronised: int = 0
    late: dict[int, tuple[str, int]] = field(default_factory=dict)
    # Steps in which nobody is late.
    on_time: tuple[int, ...] = ()
    # Why and by how much one more rank is late, another one in every step.
    in_turn: tuple[str, int] | None = None
    elements: int = 50_000_000


class Span(NamedTuple):
    """Something on a device; `unit` and `role` are empty for what is nobody's."""

    rank: int
    kind: str
    unit: str
    role: str
    start: int
    end: int


class Built(NamedTuple):
    paths: list[Path]
    spans: list[Span]
    windows: list[list[tuple[int, int]]]

    def covered(self, rank: int, kind: str, within: tuple[int, int]) -> set[int]:
        """Every microsecond of a rank in which something of this kind runs."""
        begin, end = within
        return {
            moment
            for span in self.spans
            if span.rank == rank and span.kind == kind
            for moment in range(max(span.start, begin), min(span.end, end))
        }

    def exposed(self, rank: int, unit: str, role: str) -> int:
        """Microseconds of one unit's collectives with no compute beside them."""
        mine = [s for s in self.spans if (s.rank, s.unit, s.role) == (rank, unit, role)]
        moments = {m for s in mine for m in range(s.start, s.end)}
        return len(moments - self.covered(rank, "compute", (0, 10**9)))

    def total(self, rank: int, unit: str, role: str) -> int:
        return sum(
            s.end - s.start for s in self.spans if (s.rank, s.unit, s.role) == (rank, unit, role)
        )


class _Builder:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.events: list[list[dict[str, Any]]] = [[] for _ in range(plan.ranks)]
        self.spans: list[Span] = []
        self.windows: list[list[tuple[int, int]]] = [[] for _ in range(plan.ranks)]
        self.compute = [1000] * plan.ranks  # when each stream is free
        self.gathering = [1000] * plan.ranks
        self.scattering = [1000] * plan.ranks
        self.host = [0] * plan.ranks  # far ahead of the device
        self.correlation = 0

    def event(self, rank: int, category: str, name: str, start: int, end: int, **more: Any) -> None:
        args = more.pop("args", {})
        self.events[rank].append(
            {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": float(start),
             "dur": float(end - start), "args": args, **more}
        )  # fmt: skip

    def launch(self, rank: int, at: int | None = None) -> int:
        """A launch on the host, by default ahead of the device; returns its correlation."""
        self.correlation += 1
        begin = self.host[rank] if at is None else at
        self.host[rank] = max(self.host[rank], begin + LAUNCH)
        self.event(rank, "cuda_runtime", "cudaLaunchKernel", begin, begin + LAUNCH,
                   args={"correlation": self.correlation})  # fmt: skip
        return self.correlation

    def kernel(self, rank: int, name: str, stream: int, start: int, end: int, correlation: int,
               **args: Any) -> None:  # fmt: skip
        about = {"device": 0, "stream": stream, "correlation": correlation, **args}
        self.event(rank, "kernel", name, start, end, pid=0, tid=stream, args=about)

    def note(self, rank: int, name: str) -> _Note:
        return _Note(self, rank, name)

    def run(self, name: str, unit: str, role: str, length: int, after: list[int] | None = None,
            slower: bool = False) -> None:  # fmt: skip
        """Compute on every rank, after its stream and `after`."""
        for rank in range(self.plan.ranks):
            start = max(self.compute[rank], after[rank] if after else 0)
            asked = None
            if self.plan.host_gap:
                start += self.plan.host_gap
                asked = start  # launched when it runs
            kind, extra = self.plan.late.get(rank, ("", 0))
            mine = length + (extra if slower and kind == "compute" else 0)
            number = self.launch(rank, asked)
            self.kernel(rank, name, COMPUTE, start, start + mine, number)
            self.spans.append(Span(rank, "compute", unit, role, start, start + mine))
            self.compute[rank] = start + mine

    def move(self, what: str, unit: str, role: str, length: int, ready: list[int]) -> list[int]:
        """A collective: every rank arrives when its stream is free, all leave together."""
        gathers = what == "all_gather"
        stream = GATHER if gathers else SCATTER
        free = self.gathering if gathers else self.scattering
        arrivals = [max(free[r], ready[r]) for r in range(self.plan.ranks)]
        if not self.plan.separate:
            busy = self.scattering if gathers else self.gathering
            arrivals = [max(a, busy[r]) for r, a in enumerate(arrivals)]
        end = max(arrivals) + length
        world, part = self.plan.ranks, self.plan.elements
        for rank, start in enumerate(arrivals):
            number = self.launch(rank)
            name = "ncclDevKernel_AllGather_RING" if gathers else "ncclDevKernel_ReduceScatter_RING"
            self.kernel(
                rank, name, stream, start, end, number,
                **{"Collective name": "_allgather_base" if gathers else "_reduce_scatter_base",
                   "In msg nelems": part if gathers else part * max(world, 2),
                   "Out msg nelems": part * max(world, 2) if gathers else part,
                   "Group size": max(world, 2), "dtype": "BFloat16", "Process Group Name": "0",
                   "Process Group Ranks": str(list(range(max(world, 2))))}
            )  # fmt: skip
            self.spans.append(Span(rank, "communication", unit, role, start, end))
            free[rank] = end
        return [end] * self.plan.ranks


class _Note:
    """An annotation of FSDP2 around launches."""

    def __init__(self, builder: _Builder, rank: int, name: str) -> None:
        self.builder, self.rank, self.name = builder, rank, name

    def __enter__(self) -> None:
        self.start = self.builder.host[self.rank]
        self.builder.host[self.rank] += 1

    def __exit__(self, *_: object) -> None:
        end = self.builder.host[self.rank] + 1
        self.builder.host[self.rank] = end + 1
        self.builder.event(self.rank, "user_annotation", self.name, self.start, end)


class _Notes:
    """The same annotation on every rank."""

    def __init__(self, builder: _Builder, name: str) -> None:
        self.notes = [builder.note(rank, name) for rank in range(builder.plan.ranks)]

    def __enter__(self) -> None:
        for note in self.notes:
            note.__enter__()

    def __exit__(self, *_: object) -> None:
        for note in self.notes:
            note.__exit__()


def build(folder: Path, plan: Plan, offset: int = 0) -> Built:
    """Write the traces of all ranks; the clock of rank r is `offset` times r ahead."""
    b = _Builder(plan)
    for step in range(plan.steps):
        begins = list(b.compute)
        b.plan = replace(plan, late=_late_in(step, plan))
        _before_step(b, b.plan)
        for number in range(plan.micro_batches):
            _micro_batch(b, plan, last=number == plan.micro_batches - 1)
        b.run("adam", "", "", plan.optimizer, b.scattering)
        for rank in range(plan.ranks):
            b.windows[rank].append((begins[rank], b.compute[rank]))
            b.event(rank, "gpu_user_annotation", f"ProfilerStep#{step}", begins[rank],
                    b.compute[rank], pid=0, tid=COMPUTE)  # fmt: skip
    return _write(folder, b, plan, offset)


def _late_in(step: int, plan: Plan) -> dict[int, tuple[str, int]]:
    """Who is late in a step, why and by how much."""
    if step in plan.on_time:
        return {}
    turn = {step % plan.ranks: plan.in_turn} if plan.in_turn else {}
    return {**turn, **plan.late}


def _before_step(b: _Builder, plan: Plan) -> None:
    """What the host does before the first kernel of a step."""
    for rank in range(plan.ranks):
        kind, extra = plan.late.get(rank, ("", 0))
        data = plan.data + (extra if kind == "data" else 0)
        silent = extra if kind == "host" else 0
        if not (data or silent or plan.malloc or plan.limiter or plan.synchronised):
            continue
        drained = b.compute[rank]
        now = drained
        if plan.synchronised:
            b.event(rank, "cpu_op", "aten::item", b.host[rank], drained)
            b.event(rank, "cuda_runtime", "cudaStreamSynchronize", b.host[rank], drained)
            now += plan.synchronised
        if data:
            b.event(rank, "user_annotation", "enumerate(DataLoader)#_Iter.__next__", now,
                    now + data)  # fmt: skip
            now += data
        if plan.malloc:
            b.event(rank, "cuda_runtime", "cudaMalloc", now, now + plan.malloc)
            now += plan.malloc
        if plan.limiter:
            name = "FullyShardedDataParallel.rate_limiter"
            b.event(rank, "user_annotation", name, now, now + plan.limiter)
            now += plan.limiter
        now += silent
        b.host[rank] = now
        # Nothing of this step was launched before.
        b.compute[rank] = b.gathering[rank] = now


def _micro_batch(b: _Builder, plan: Plan, last: bool) -> None:
    every = range(plan.ranks)
    with _Notes(b, "FSDP::pre_forward"), _Notes(b, "FSDP::all_gather"):
        gathered = b.move("all_gather", "root", "gather forward", plan.gather, list(b.compute))
    here = [max(gathered[r], b.compute[r]) for r in every]
    ready = here
    for block in range(plan.blocks):
        unit = f"layers.{block}"
        with _Notes(b, f"FSDP::pre_forward ({unit})"), _Notes(b, f"FSDP::all_gather ({unit})"):
            gathered = b.move("all_gather", unit, "gather forward", plan.gather, ready)
        begins = [max(gathered[r], b.compute[r]) for r in every]
        b.run("gemm", unit, "forward", plan.forward, gathered, slower=block == 0)
        with _Notes(b, f"FSDP::post_forward ({unit})"):
            pass
        # The next gather may begin beside this block, or only after it.
        ready = begins if plan.prefetched else list(b.compute)
    gathered = [0] * plan.ranks
    for block in reversed(range(plan.blocks)):
        unit, following = f"layers.{block}", f"layers.{block - 1}"
        with _Notes(b, f"FSDP::pre_backward ({unit})"):
            if block == plan.blocks - 1 or not plan.prefetched:
                gathered = _gather_backward(b, plan, unit, list(b.compute))
            begins = [max(gathered[r], b.compute[r]) for r in every]
            if block and plan.prefetched:
                # Before this block reduces: the communicator serves in this order.
                with _Notes(b, f"FSDP::backward_prefetch for {following}"):
                    gathered_next = _gather_backward(b, plan, following, begins)
        b.run("gemm_backward", unit, "backward", plan.backward, gathered)
        with _Notes(b, f"FSDP::post_backward_accumulate ({unit})"):
            pass
        if last:
            with _Notes(b, f"FSDP::post_backward_reduce ({unit})"):
                b.move("reduce_scatter", unit, "scatter", plan.scatter, list(b.compute))
        if block and plan.prefetched:
            gathered = gathered_next
    if last:
        with _Notes(b, "FSDP::post_backward_reduce"):
            b.move("reduce_scatter", "root", "scatter", plan.scatter, list(b.compute))


def _gather_backward(b: _Builder, plan: Plan, unit: str, ready: list[int]) -> list[int]:
    with _Notes(b, f"FSDP::all_gather ({unit})"):
        return b.move("all_gather", unit, "gather backward", plan.gather, ready)


def _write(folder: Path, b: _Builder, plan: Plan, offset: int) -> Built:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for rank in range(plan.ranks):
        for event in b.events[rank]:
            event["ts"] += offset * rank
        text = json.dumps({
            "schemaVersion": 1,
            "distributedInfo": {"rank": rank, "world_size": max(plan.ranks, 2), "backend": "nccl"},
            "traceEvents": b.events[rank],
        })  # fmt: skip
        path = folder / f"synthetic_rank{rank}.json.gz"
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
        paths.append(path)
    return Built(paths, b.spans, b.windows)
