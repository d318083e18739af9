"""Save a step: synchronously, or from a copy while training continues."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.dcp.failure import ignore_single_process_warning, sentence_of
from shardwise.checkpoint.dcp.writer import CheckpointWriter
from shardwise.checkpoint.format.manifest import FileRecord, Manifest, write_manifest
from shardwise.checkpoint.format.pieces import Piece, Tensor
from shardwise.checkpoint.format.place import Place
from shardwise.checkpoint.verify.coverage import uncovered
from shardwise.engine.device import host_group, is_accelerator, use, wait_for_stream
from shardwise.engine.torch_private import save_planner

_COUNTER = itertools.count()


class SaveError(Exception):
    """A checkpoint was not saved; earlier ones remain. The message says why."""


class Saver:
    """Saves the steps of a run, one at a time.

    Every rank has one. Saving uses a process group of its own, so that saving and training never
    wait for each other's collectives.
    """

    def __init__(self, place: Place, keep: int, background: bool) -> None:
        self._place, self._keep, self._background = place, keep, background
        ignore_single_process_warning()
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._group = host_group() if several else None
        self._rank = dist.get_rank() if several else 0
        # Ranks and shapes do not change during a run, so its plan is cached.
        self._planner = save_planner(f"shardwise-{next(_COUNTER)}", check_pieces)
        self._staged: dict[str, torch.Tensor] = {}
        self._copied = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.last: int | None = None

    def save(
        self,
        updated: Mapping[str, torch.Tensor],
        others: Mapping[str, torch.Tensor],
        manifest: Manifest,
    ) -> None:
        """Start a save after the last one has finished; `wait` raises its error.

        In the background, `updated` is copied while training continues: call `wait_until_copied`
        before changing it.
        """
        self.wait()
        if not self._background:
            self._write({**updated, **others}, manifest)
            return
        copies = {name: tensor.detach().clone() for name, tensor in others.items()}
        self._copied.clear()
        self._thread = threading.Thread(
            target=self._copy_and_write, args=(updated, copies, manifest), daemon=True
        )
        self._thread.start()

    def wait_until_copied(self) -> None:
        """Wait until the tensors being saved may be changed."""
        if self._thread is not None:
            self._copied.wait()

    def wait(self) -> None:
        """Wait until the last save is complete; raise SaveError on every rank if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise SaveError(f"Checkpoint not saved: {sentence_of(failure)}") from failure

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _copy_and_write(
        self,
        updated: Mapping[str, torch.Tensor],
        copies: dict[str, torch.Tensor],
        manifest: Manifest,
    ) -> None:
        state: dict[str, torch.Tensor] = {}
        failure: Exception | None = None
        try:
            state = {**self._stage(updated), **copies}
        except Exception as error:
            failure = error
        finally:
            self._copied.set()
        self._write(state, manifest, failure)

    def _write(
        self, state: dict[str, Any], manifest: Manifest, failure: Exception | None = None
    ) -> None:
        step = manifest.step

        def commit(files: list[FileRecord]) -> None:
            self._place.commit(step, write_manifest(manifest.but(files=tuple(files))))
            self._remove_old(step)

        # Reading back takes a third of a save; in the background nobody waits for it.
        reads_back = self._background
        writer = CheckpointWriter(self._place, step, self._rank, commit, reads_back, failure)
        try:
            save(
                state,
                storage_writer=writer,
                planner=self._planner,
                process_group=self._group,
                no_dist=self._group is None,
            )
            self.last = step
        except BaseException as error:  # CheckpointException derives from it
            self._failure = error

    def _remove_old(self, saved: int) -> None:
        """Remove checkpoints older than `saved`, so that `keep` remain with it.

        Newer ones stay: they could not be loaded, and someone may want to look at them.
        """
        if not self._keep:
            return
        # A checkpoint that cannot be removed does not fail the save; stores raise various errors.
        with contextlib.suppress(Exception):
            older = [step for step in self._place.steps() if step < saved]
            for step in older[: max(0, len(older) - (self._keep - 1))]:
                self._place.remove(step)

    def _stage(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy tensors to the host, into the same memory every time."""
        devices = {_local(tensor).device for tensor in state.values()}
        for device in devices:
            use(device)
        for name, tensor in state.items():
            copy = self._staged.get(name)
            if copy is None:
                copy = self._staged[name] = _empty_copy(tensor)
            _local(copy).copy_(_local(tensor), non_blocking=True)
        for device in devices:
            wait_for_stream(device)
        return self._staged


def check_pieces(metadata: Metadata) -> None:
    """Raise ValueError unless the pieces of every tensor cover it once.

    Comparing corners takes one pass; torch compares the pieces pair by pair.
    """
    for name, stored in metadata.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            raise TypeError(f"{name} is not a tensor; only tensors can be saved")
        pieces = [Piece(name, tuple(c.offsets), tuple(c.sizes), "", 0, 0)
                  for c in stored.chunks]  # fmt: skip
        if why := uncovered(Tensor(name, "", tuple(stored.size)), pieces):
            raise ValueError(f"{name}: {why}")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _empty_copy(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor on the host, sharded like `tensor`."""
    local = _local(tensor)
    copy = torch.empty_like(local, device="cpu", pin_memory=is_accelerator(local.device))
    if not isinstance(tensor, DTensor):
        return copy
    return DTensor.from_local(
        copy,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
