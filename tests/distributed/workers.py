"""Gloo ranks that are started once and run the cases of many tests.

Starting a process that has imported torch and transformers takes seconds; a case takes a fraction
of one. The ranks are forked from one process that has done the imports. A case is a function of a
module that the ranks can import, and what it is called with; it runs on the first `world` ranks,
which are a process group of that size. If a rank dies, hangs or raises, the case fails with the
rank's traceback and output, and the next case gets new ranks.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from tests.command import PATIENCE_S

# What every case needs, imported once before the ranks are forked.
PRELOADED = (
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torchao.optim",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    # Of ours, what most cases run.
    "tests.distributed.engine_run",
    "tests.distributed.tensor_run",
    "tests.distributed.train_run",
)
# How long the other ranks may still take once one has failed.
GRACE_S = 5.0
# Of a collective: a busy machine may stop a rank for many seconds.
COLLECTIVE_S = 120

Case = Mapping[str, Any]


class Request(NamedTuple):
    """One case for one rank."""

    function: Callable[[Any], Any]
    case: Case
    world: int
    store: str
    environment: dict[str, str]


class Reply(NamedTuple):
    """What a rank's function returned, or the traceback of what it raised."""

    value: Any = None
    failure: str = ""
    # Whether the case has left the process group, as a run does at its end.
    left: bool = False


class Rank(NamedTuple):
    """One process, the pipe to it and the file its output goes to."""

    process: BaseProcess
    pipe: Connection
    output: Path


class RankFailedError(AssertionError):
    """A case failed on a rank; the message holds the rank's traceback and the end of its output."""


class Workers:
    """Ranks that run cases, one case at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADED))
        self._ranks: list[Rank] = []
        self._world = 0
        self._number = 0  # of process groups so far

    def run(
        self,
        function: Callable[[Any], Any],
        world: int,
        cases: Sequence[Case],
        timeout_s: float = PATIENCE_S,
    ) -> list[list[Any]]:
        """Run each case on `world` ranks; by case, what each rank returned, in order of ranks."""
        return [self._run(function, world, case, timeout_s) for case in cases]

    def close(self) -> None:
        """End all ranks; the next case starts new ones."""
        for rank in self._ranks:
            rank.process.kill()
            rank.process.join()
            rank.pipe.close()
        self._ranks, self._world = [], 0

    def _run(
        self, function: Callable[[Any], Any], world: int, case: Case, timeout_s: float
    ) -> list[Any]:
        while len(self._ranks) < world:
            self._ranks.append(self._start(len(self._ranks)))
        if world != self._world:
            self._world, self._number = world, self._number + 1
        store = str(self._folder / f"store-{self._number}")
        request = Request(function, case, world, store, dict(os.environ))
        ranks = self._ranks[:world]
        try:
            for rank in ranks:
                rank.pipe.send(request)
            replies = self._collect(ranks, timeout_s)
        except BaseException:
            self.close()
            raise
        failures = [
            f"rank {number}: {reply.failure}\n{_end_of(ranks[number].output)}"
            for number, reply in sorted(replies.items())
            if reply.failure
        ]
        if failures:
            self.close()
            raise RankFailedError("\n".join([f"case {dict(case)}", *failures]))
        if any(reply.left for reply in replies.values()):
            self._world = 0
        return [replies[number].value for number in range(world)]

    def _start(self, number: int) -> Rank:
        ours, theirs = self._context.Pipe()
        output = self._folder / f"rank-{number}-{self._number}.txt"
        process = self._context.Process(
            target=_serve, args=(theirs, number, str(output)), daemon=True
        )
        process.start()
        theirs.close()
        return Rank(process, ours, output)

    def _collect(self, ranks: Sequence[Rank], timeout_s: float) -> dict[int, Reply]:
        """The reply of every rank; once one has failed, the others get a short time to answer."""
        replies: dict[int, Reply] = {}
        waiting = {rank.pipe: number for number, rank in enumerate(ranks)}
        end = time.monotonic() + timeout_s
        while waiting and (left := end - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                number = waiting.pop(pipe)  # type: ignore[call-overload]
                try:
                    reply = ranks[number].pipe.recv()
                except (EOFError, ConnectionResetError):
                    ranks[number].process.join()
                    reply = Reply(failure=f"ended with code {ranks[number].process.exitcode}")
                replies[number] = reply
                if reply.failure:
                    end = min(end, time.monotonic() + GRACE_S)
        for number in waiting.values():
            replies[number] = Reply(failure="gave no answer in time")
        return replies


def _end_of(output: Path) -> str:
    return output.read_text(errors="replace")[-4000:] if output.exists() else ""


def _serve(pipe: Connection, rank: int, output: str) -> None:
    """Run cases until the pipe is closed. This is the whole life of a rank."""
    import torch
    import torch.distributed as dist

    with open(output, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    gc.freeze()  # what was imported need not be searched again after every case
    joined = ""
    while True:
        try:
            request: Request = pipe.recv()
        except EOFError:
            os._exit(0)  # threads of Gloo may still run: no clean-up at exit
        os.environ.clear()
        os.environ.update(request.environment)
        torch.set_num_threads(1)
        try:
            if request.store != joined:
                _join(rank, request)
                joined = request.store
            value = request.function(request.case)
            gc.collect()
            leave_groups()
            reply = Reply(value, left=not dist.is_initialized())
        except BaseException:
            reply = Reply(failure=traceback.format_exc())
        pipe.send(reply)


def leave_groups() -> None:
    """Leave all process groups if the case has made any, as every device mesh does.

    Each keeps threads of Gloo that wake a hundred times a second. DTensor remembers results by
    mesh: an equal mesh of the next case would get groups that are gone.
    """
    import torch.distributed as dist
    from torch.distributed.tensor import debug

    if dist.is_initialized() and len(dist.distributed_c10d._world.pg_map) > 1:
        dist.destroy_process_group()
        debug._clear_sharding_prop_cache()
        gc.collect()


def _join(rank: int, request: Request) -> None:
    """Leave the last process group, and make one of the size that the case asks for."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(request.store, request.world),
        rank=rank,
        world_size=request.world,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )
