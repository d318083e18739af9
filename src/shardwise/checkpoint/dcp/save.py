"""Save a step: at once, or from a copy while training goes on."""

from __future__ import annotations

import contextlib
import itertools
import threading
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.dcp.failure import sentence_of
from shardwise.checkpoint.dcp.writer import CheckpointWriter
from shardwise.checkpoint.format.manifest import FileRecord, Manifest, write_manifest
from shardwise.checkpoint.format.pieces import Piece, Tensor
from shardwise.checkpoint.format.place import Place
from shardwise.checkpoint.verify.coverage import uncovered

_COUNTER = itertools.count()


class SaveError(Exception):
    """A checkpoint was not saved; those before are still there. Says what went wrong."""


class Saver:
    """Saves one step after another to a place; one save is under way at a time.

    Every rank has one. Ranks talk about a save through a group of their own, so that saving and
    training never wait for each other's collectives.
    """

    def __init__(self, place: Place, keep: int, background: bool) -> None:
        self._place, self._keep, self._background = place, keep, background
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo") if several else None
        self._rank = dist.get_rank() if several else 0
        self._planner = Planner()
        self._staged: dict[str, torch.Tensor] = {}
        self._copied = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.last: int | None = None

    def save(
        self,
        updated: Mapping[str, torch.Tensor],
        others: Mapping[str, torch.Tensor],
        about: Manifest,
    ) -> None:
        """Begin; and where that is not done in the background, end. The one before ends first.

        Whether it went well, `wait` tells. In the background, `updated` is copied while training
        goes on: `settle` before changing it.
        """
        self.wait()
        if not self._background:
            self._write({**updated, **others}, about)
            return
        own = {name: tensor.detach().clone() for name, tensor in others.items()}
        self._copied.clear()
        self._thread = threading.Thread(
            target=self._copy_and_write, args=(updated, own, about), daemon=True
        )
        self._thread.start()

    def settle(self) -> None:
        """Until what is being saved may be changed again."""
        if self._thread is not None:
            self._copied.wait()

    def wait(self) -> None:
        """Until the last save is done; raises what went wrong with it, on every rank."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise SaveError(f"checkpoint: not saved: {sentence_of(failure)}") from failure

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _copy_and_write(
        self, updated: Mapping[str, torch.Tensor], own: dict[str, torch.Tensor], about: Manifest
    ) -> None:
        state: dict[str, torch.Tensor] = {}
        failure: Exception | None = None
        try:
            state = {**self._stage(updated), **own}
        except Exception as error:
            failure = error
        finally:
            self._copied.set()
        self._write(state, about, failure)

    def _write(
        self, state: dict[str, Any], about: Manifest, failure: Exception | None = None
    ) -> None:
        step = about.step

        def commit(files: list[FileRecord]) -> None:
            self._place.commit(step, write_manifest(about.but(files=tuple(files))))
            self._remove_old(step)

        # Reading back costs a third of a save: nothing, if nobody waits for it.
        reads_back = self._background
        writer = CheckpointWriter(self._place, step, self._rank, commit, reads_back, failure)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that one process saves alone
                save(
                    state,
                    storage_writer=writer,
                    planner=self._planner,
                    process_group=self._group,
                    no_dist=self._group is None,
                )
            self.last = step
        except BaseException as error:  # torch's own derives from it
            self._failure = error

    def _remove_old(self, saved: int) -> None:
        """Of those before the one that was saved just now, leave as many as are kept beside it.

        Newer ones are left too: they could not be loaded, and say nothing of what is good.
        """
        if not self._keep:
            return
        # One too many is no failed save, and stores have errors of their own kinds.
        with contextlib.suppress(Exception):
            older = [step for step in self._place.steps() if step < saved]
            for step in older[: max(0, len(older) - (self._keep - 1))]:
                self._place.remove(step)

    def _stage(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A copy on the host, into the same memory every time."""
        devices = {_local(tensor).device for tensor in state.values()} - {torch.device("cpu")}
        for device in devices:
            # A new thread knows nothing of the device of the process.
            torch.cuda.set_device(device)
        for name, tensor in state.items():
            kept = self._staged.get(name)
            if kept is None:
                kept = self._staged[name] = _room_for(tensor)
            _local(kept).copy_(_local(tensor), non_blocking=True)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return self._staged


class Planner(DefaultSavePlanner):
    """Ranks and shapes stay as they are during a run, and so does who writes what."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, enable_plan_caching=True)
        # Torch keeps plans by the name of the class, for the whole process.
        self._cached_plans_key = f"shardwise-{next(_COUNTER)}"

    def _create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """As torch does it, but for how it is checked.

        Torch compares the pieces of tensors that are wider than high pair by pair: for a 70B on
        4,096 ranks that would take a quarter of an hour. Their corners tell the same in one pass.
        """
        deduplicated = self._dedup_save_plans(all_plans)
        plan, metadata = create_default_global_save_plan(deduplicated)
        for name, stored in metadata.state_dict_metadata.items():
            if not isinstance(stored, TensorStorageMetadata):
                raise TypeError(f"{name}: only tensors are saved")
            pieces = [Piece(name, tuple(c.offsets), tuple(c.sizes), "", 0, 0)
                      for c in stored.chunks]  # fmt: skip
            if why := uncovered(Tensor(name, "", tuple(stored.size)), pieces):
                raise ValueError(f"{name}: {why}")
        return plan, metadata


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _room_for(tensor: torch.Tensor) -> torch.Tensor:
    local = _local(tensor)
    room = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
    if not isinstance(tensor, DTensor):
        return room
    return DTensor.from_local(
        room,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
