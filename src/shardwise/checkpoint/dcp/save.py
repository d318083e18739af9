"""Save a step: synchronously, or from a copy while training continues."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.dcp.failure import ignore_single_process_warning, sentence_of
from shardwise.checkpoint.dcp.plan import LocalShard, ShardPlanner, local_shards, make_plan
from shardwise.checkpoint.dcp.raw import bytes_of
from shardwise.checkpoint.dcp.writer import CheckpointWriter
from shardwise.checkpoint.format import layout, rank_table
from shardwise.checkpoint.format.checksum import crc32
from shardwise.checkpoint.format.layout import Layout
from shardwise.checkpoint.format.manifest import FileRecord, Manifest, write_manifest
from shardwise.checkpoint.format.rank_table import ROW_BYTES, RankRecord, pack_record
from shardwise.checkpoint.format.storage import CheckpointStorage
from shardwise.engine.rank_tree import RankTree
from shardwise.pytorch.device import is_accelerator, use, wait_for_stream

T = TypeVar("T")


class SaveError(Exception):
    """A checkpoint was not saved; earlier ones remain. The message says why."""


class Saver:
    """Saves the checkpoints of a run, one at a time. Every rank has a Saver.

    Saving uses a process group of its own, so that saving and training never wait for each other's
    collectives. `last` is the step of the last complete checkpoint; None before the first.
    """

    def __init__(self, place: CheckpointStorage, keep: int, background: bool) -> None:
        """`keep` checkpoints remain after a save, 0 keeps all; `background` saves in a thread."""
        self._place, self._keep, self._background = place, keep, background
        ignore_single_process_warning()
        self._tree = RankTree(separate=True)
        self._staged: dict[str, torch.Tensor] = {}
        self._copied = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.last: int | None = None
        # The step of a checkpoint that is kept beside the newest; set between saves.
        self.best: int | None = None

    def save(
        self,
        updated: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        own: Mapping[str, torch.Tensor],
        manifest: Manifest,
        unchanged: bool = False,
    ) -> None:
        """Start a save after the last save has finished; `wait` raises its error.

        All ranks hold `updated` and `buffers`; `own` are tensors of this rank alone. In the
        background, `updated` is copied while training continues: call `wait_until_copied` before
        changing it. `unchanged` promises that it does not change until `wait`: then a thread saves
        in any case, and this never waits for it.
        """
        self.wait()
        if not self._background and not unchanged:
            self._write({**updated, **buffers}, own, manifest)
            return
        copies, own_copies = (
            {name: tensor.detach().clone() for name, tensor in tensors.items()}
            for tensors in (buffers, own)
        )
        self._copied.clear()
        self._thread = threading.Thread(
            target=self._copy_and_write, args=(updated, copies, own_copies, manifest), daemon=True
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
            if isinstance(failure, SaveError):
                raise failure
            raise SaveError(f"Checkpoint not saved: {sentence_of(failure)}") from failure

    @property
    def busy(self) -> bool:
        """Whether a save is running in the background."""
        return self._thread is not None and self._thread.is_alive()

    def _copy_and_write(
        self,
        updated: Mapping[str, torch.Tensor],
        copies: dict[str, torch.Tensor],
        own: dict[str, torch.Tensor],
        manifest: Manifest,
    ) -> None:
        """Copy `updated` to the host if saving in the background, then write the checkpoint.

        This is the body of the thread; `copies` are copies of the buffers.
        """
        state: dict[str, torch.Tensor] = {}
        failure: Exception | None = None
        try:
            state = {**(self._copy_to_host(updated) if self._background else updated), **copies}
        except Exception as error:
            failure = error
        finally:
            self._copied.set()
        self._write(state, own, manifest, failure)

    def _write(
        self,
        state: Mapping[str, torch.Tensor],
        own: Mapping[str, torch.Tensor],
        manifest: Manifest,
        failure: Exception | None = None,
    ) -> None:
        """Write a checkpoint; keep an error for `wait` instead of raising it.

        `failure` is an earlier error of this rank: it makes the save fail on all ranks.
        """
        try:
            self._save(state, own, manifest, failure)
            self.last = manifest.step
        except Exception as error:
            self._failure = error
            # A SaveError is raised on all ranks, so that no rank still writes files.
            if isinstance(error, SaveError) and self._tree.rank == 0:
                self._discard(manifest.step)

    def _save(
        self,
        state: Mapping[str, torch.Tensor],
        own: Mapping[str, torch.Tensor],
        manifest: Manifest,
        failure: Exception | None,
    ) -> None:
        """Write a checkpoint on all ranks and commit it; raise SaveError on all if one fails."""
        tree, step = self._tree, manifest.step

        def begin() -> dict[str, LocalShard]:
            if failure is not None:
                raise failure
            if tree.rank == 0:
                self._place.begin(step)
            return local_shards(state, tree.rank, tree.size)

        plan = make_plan(self._on_all_ranks(begin), own, tree)
        # Only in the background are files read back: that takes a third of the time of a save.
        writer = CheckpointWriter(self._place, step, tree.rank, plan.own, self._background)

        def write() -> None:
            # no_dist: each rank saves its own plan, and torch gathers nothing.
            tensors: dict[str, Any] = {**state, **own}
            planner = ShardPlanner(plan)
            save(tensors, storage_writer=writer, planner=planner, no_dist=True)

        self._on_all_ranks(write)
        rows = self._table_rows(writer.record)

        def commit() -> None:
            if tree.rank == 0:
                files = (self._add_layout(step, plan.layout), self._add_table(step, rows))
                self._place.commit(step, write_manifest(manifest.but(files=files)))
                self._remove_old(step)

        self._on_all_ranks(commit)

    def _on_all_ranks(self, action: Callable[[], T]) -> T:
        """Run `action` and return its result; if it fails on one rank, raise SaveError on all."""
        result: T | None = None
        why = ""
        try:
            result = action()
        except (Exception, CheckpointException) as error:
            why = sentence_of(error)
        if failed := self._tree.first_failure(why):
            raise SaveError(f"Checkpoint not saved: rank {failed.rank}: {failed.why}")
        return cast(T, result)

    def _table_rows(self, record: RankRecord) -> bytes:
        """The records of all ranks as bytes, in order of rank."""
        table = torch.zeros(self._tree.size, ROW_BYTES, dtype=torch.uint8)
        row = bytearray(pack_record(record))
        table[self._tree.rank] = torch.frombuffer(row, dtype=torch.uint8)
        # All other rows are 0 on this rank, so that the sum has every row once.
        self._tree.all_reduce(table)
        return bytes(bytes_of(table))

    def _add_layout(self, step: int, found: Layout) -> FileRecord:
        """Write layout.json to the checkpoint; return its record for the manifest."""
        data = layout.write_layout(found)
        self._write_file(step, layout.NAME, data)
        return FileRecord(name=layout.NAME, bytes=len(data), head=len(data), crc32=crc32(data))

    def _add_table(self, step: int, rows: bytes) -> FileRecord:
        """Write the table of ranks to the checkpoint; return its record for the manifest."""
        data, record = rank_table.write_table(rows)
        self._write_file(step, rank_table.NAME, data)
        return record

    def _write_file(self, step: int, name: str, data: bytes) -> None:
        """Write a file of the checkpoint."""
        with self._place.create(step, name) as file:
            file.write(data)

    def _discard(self, step: int) -> None:
        """Remove the files of a failed save: a full disk would stay full until the next save."""
        # The next save removes files that cannot be removed now; stores raise various errors.
        with contextlib.suppress(Exception):
            self._place.discard(step)

    def _remove_old(self, saved: int) -> None:
        """Remove the oldest checkpoints, so that `keep` remain with that of step `saved`.

        The best one remains as well.
        Newer checkpoints stay: they could not be loaded, and someone may want to look at them.
        """
        if not self._keep:
            return
        # A checkpoint that cannot be removed does not fail the save; stores raise various errors.
        with contextlib.suppress(Exception):
            older = [step for step in self._place.steps() if step < saved]
            for step in older[: max(0, len(older) - (self._keep - 1))]:
                if step != self.best:
                    self._place.remove(step)

    def _copy_to_host(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy tensors to the host, into the same memory in every save; return the copies."""
        devices = {_local_shard(tensor).device for tensor in state.values()}
        for device in devices:
            use(device)
        for name, tensor in state.items():
            copy = self._staged.get(name)
            if copy is None:
                copy = self._staged[name] = _empty_copy(tensor)
            _local_shard(copy).copy_(_local_shard(tensor), non_blocking=True)
        for device in devices:
            wait_for_stream(device)
        return self._staged


def _local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of a DTensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _empty_copy(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialised tensor on the host, sharded like `tensor`.

    Its memory is pinned if `tensor` is on an accelerator.
    """
    local = _local_shard(tensor)
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
