"""Save a training between steps, and resume it from the last intact checkpoint."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.dcp import state
from shardwise.checkpoint.dcp.load import Loaded, UnreachableError, load_last
from shardwise.checkpoint.dcp.save import SaveError, Saver
from shardwise.checkpoint.format.folder import is_remote
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.format.pieces import Tensor
from shardwise.checkpoint.format.run_folder import storage_in
from shardwise.checkpoint.format.storage import CheckpointStorage, name_of
from shardwise.engine.adapter import base_digest
from shardwise.engine.compress import (
    compression_state,
    is_compression_state,
    restore_compression,
)
from shardwise.engine.mesh import world
from shardwise.engine.rank_tree import shared_tree
from shardwise.launch.heartbeat import report
from shardwise.pytorch.device import PeerFailedError
from shardwise.spec.file_errors import is_wrong_name
from shardwise.spec.optimizer import LOW_BIT
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec, run_table
from shardwise.trainer.best import Best, best_of, held_out_set
from shardwise.trainer.evaluation import Evaluated
from shardwise.trainer.folder import versions
from shardwise.trainer.loop import Training
from shardwise.trainer.save_pace import SavePace

log = logging.getLogger("shardwise")
# Settings that determine the order of samples, by section.
_ORDER = {
    "job": ("seq_len",),
    "train": ("seed",),
    "data": ("path", "source", "tokenizer", "shuffle"),
}
# Version of the synthetic data. Older checkpoints drew other sequences and name no version.
_SYNTHETIC = {"synthetic data": "2"}


def _check_shared(place: CheckpointStorage, writer: str) -> None:
    """Raise on every rank unless rank 0 can write to `place` and all other ranks see its file.

    Rank 0 commits checkpoints for all ranks. Object stores are not checked.
    """
    if is_remote(place.url):
        return
    tree, probe = shared_tree(), Path(place.url, f".shared-{writer}")
    try:
        create = partial(_create, probe) if tree.rank == 0 else lambda: None
        _check_on_all_ranks(create, f"cannot write to {place.url}")
        _check_on_all_ranks(probe.stat, f"rank {tree.rank} cannot see {place.url} of rank 0")
    finally:
        if tree.rank == 0:
            with suppress(OSError):
                probe.unlink()


def _create(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


def _check_on_all_ranks(action: Callable[[], object], problem: str) -> None:
    """Run `action` on this rank; raise on every rank if it fails with OSError on any.

    Raises:
        SpecError: It failed on this rank, and another folder would help.
        UnreachableError: It failed on this rank, and on some rank another folder would not help.
        PeerFailedError: It failed on another rank. This one can continue without that host.
    """
    tree, error = shared_tree(), None
    try:
        action()
    except OSError as raised:
        error = raised
    why = f"{problem}: {error.strerror or error}" if error is not None else ""
    failed = tree.first_failure(why)
    if failed is None:
        return
    if lost := tree.first_failure("" if error is None or is_wrong_name(error) else why):
        message = f"train.checkpoint: {lost.why}"
        raise UnreachableError(message) if error is not None else PeerFailedError(message)
    message = (
        f"train.checkpoint: {failed.why}; set train.checkpoint.to to a folder that all machines "
        "can write to, or to an object store"
    )
    raise SpecError(message) if error is not None else PeerFailedError(message)


def _shards(run: Mapping[str, Any]) -> int:
    """The number of shards of each parameter: shard × context degree of a run's settings."""
    strategy = run.get("strategy", {})
    return int(strategy.get("shard") or 1) * int(strategy.get("context") or 1)


def _compression(run: Mapping[str, Any]) -> tuple[object, ...]:
    """The settings of a run that the state of compressed gradients depends on."""
    strategy = run.get("strategy", {})
    keys = ("compress", "powersgd_rank", "ddp_bucket_mib", "master_dtype")
    return tuple(strategy.get(key) for key in keys)


def _without_folder(value: object) -> object:
    """A path, or each path of a list, reduced to the file name; other values unchanged.

    Files may have moved since the checkpoint.
    """
    if isinstance(value, list | tuple):
        return [_without_folder(one) for one in value]
    return Path(value).name if isinstance(value, str) else value


class RunCheckpoints:
    """Saves and loads the checkpoints of one run, on one rank."""

    def __init__(self, run: RunSpec, training: Training, folder: Path, writer: str = "run") -> None:
        """`writer` tells this run apart from others that use the same folder at the same time."""
        self._training = training
        self._settings = training.settings.checkpoint
        self._rank, self._world = world()
        self._place = storage_in(folder, self._settings.to)
        _check_shared(self._place, writer)
        self._saver = Saver(self._place, self._settings.keep, self._settings.background)
        self._run = run_table(run)
        self._is_synthetic = run.data is None or run.data.synthetic
        # With a step interval (`every`), the user has decided when the first save is.
        self._pace = SavePace(
            self._settings.minutes, time.monotonic(), early=self._settings.every is None
        )
        self._saved: int | None = None
        self._loaded: int | None = None
        # Steps of checkpoints that could not be loaded.
        self._corrupt: frozenset[int] = frozenset()
        self._failure: SaveError | None = None
        self._keeps_best = run.eval is not None and run.eval.keep_best
        # The complete checkpoint with the lowest held-out loss, and that with the one in progress.
        self._complete_best: Best | None = None
        self._best: Best | None = None

    @property
    def last_step(self) -> int | None:
        """The step of the last completed checkpoint; None if there is none."""
        return self._saver.last if self._saver.last is not None else self._loaded

    @property
    def last_url(self) -> str | None:
        """The path or URL of the last completed checkpoint; None if there is none."""
        step = self.last_step
        return None if step is None else self.url_of(step)

    @property
    def best(self) -> Best | None:
        """Step and held-out loss of the best checkpoint; None without eval.keep_best."""
        return self._complete_best

    def url_of(self, step: int) -> str:
        """The path or URL of the checkpoint of a step."""
        return f"{self._place.url.rstrip('/')}/{name_of(step)}"

    @property
    def is_saving(self) -> bool:
        """Whether a save of this process is in progress."""
        return self._saver.busy

    def is_saved(self, step: int) -> bool:
        """Whether a complete checkpoint of `step` exists. All ranks must call this.

        Any process may have written it. A checkpoint that could not be loaded counts as not saved.
        """
        saved = False
        if self._rank == 0:
            saved = step not in self._corrupt and step in self._place.steps()
        found = torch.tensor([saved or step == self._saver.last], dtype=torch.int64)
        shared_tree().all_reduce(found)
        return bool(found)

    def load(self) -> Loaded | None:
        """Load the last intact checkpoint into the training; None if there is none.

        All ranks must call this.
        """
        loaded = load_last(self._place, self._allocate)
        if loaded is None:
            report(loaded=-1)
            return None
        t, manifest = self._training, loaded.manifest
        state.restore_quantised(t.model, t.optimizer, self._updated)
        t.step = self._saved = self._loaded = manifest.step
        self._corrupt = loaded.skipped_steps
        t.batches.seek(manifest.step, manifest.sequences)
        if manifest.eval_loss is not None and held_out_set(manifest.run) == held_out_set(self._run):
            t.evaluated = Evaluated(manifest.step, manifest.eval_loss)
        if self._keeps_best:
            self._best = self._complete_best = best_of(self._place, manifest.step, self._run)
        if manifest.world == self._world:
            prefix = f"{state.RANK}.{self._rank}."
            own = {name.removeprefix(prefix): tensor for name, tensor in self._rank_state.items()}
            t.rank_state = {n: kept for n, kept in own.items() if not is_compression_state(n)}
            same = _compression(manifest.run) == _compression(self._run)
            restore_compression(t.model, t.step, own if same else {})
            # Last, since skipping data may draw random numbers.
            state.restore_random(t.rank_state, t.device)
        else:
            restore_compression(t.model, t.step, {})
        report(loaded=manifest.step, saved=manifest.step)
        return loaded

    def _allocate(
        self, manifest: Manifest, saved: Mapping[str, Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """The tensors to load the checkpoint into, by name.

        Raises:
            SpecError: The checkpoint does not match this run.
        """
        t = self._training
        self._check_order(manifest)
        self._check_base(manifest)
        self._check_quantised(manifest)
        state.make_optimizer_state(t.model, t.optimizer, saved)
        self._updated = state.updated_tensors(t.model, t.optimizer)
        needed = {**self._updated, **state.buffers_of(t.model)}
        for name, tensor in needed.items():
            stored = saved.get(name)
            if stored is None or stored.shape != tuple(tensor.shape):
                shape = f"has shape {list(stored.shape)}" if stored is not None else "is missing"
                raise SpecError(
                    f"checkpoint: {name} {shape} in step {manifest.step} of {self._place.url}, but "
                    f"has shape {list(tensor.shape)} in this model; use another --name for "
                    "another model"
                )
        self._rank_state = (
            state.allocate_rank_state(saved, self._rank) if manifest.world == self._world else {}
        )
        return {**needed, **self._rank_state}

    def _check_order(self, manifest: Manifest) -> None:
        """Raise SpecError if the order of samples has changed since the save.

        Otherwise some samples would repeat and others be lost.
        """
        if self._is_synthetic and not _SYNTHETIC.items() <= manifest.versions.items():
            raise SpecError(
                f"data: step {manifest.step} was saved by a version of Shardwise that draws other "
                "synthetic sequences; resume with that version, or use another --name"
            )
        for section, keys in _ORDER.items():
            for key in keys:
                before, now = (
                    _without_folder(table.get(section, {}).get(key))
                    for table in (manifest.run, self._run)
                )
                if before != now:
                    raise SpecError(
                        f"{section}.{key}: was {before!r} when step {manifest.step} was saved and "
                        f"is {now!r} now; set it back, or use another --name"
                    )

    def _check_base(self, manifest: Manifest) -> None:
        """Raise SpecError if the frozen weights or the adapters differ from the checkpoint's."""
        before, now = (table.get("adapter") for table in (manifest.run, self._run))
        if before != now:
            raise SpecError(
                f"adapter: was {before} when step {manifest.step} was saved and is {now} now; set "
                "it back, or use another --name"
            )
        if manifest.base != base_digest(self._training.model):
            raise SpecError(
                f"model: the frozen weights differ from those that step {manifest.step} of "
                f"{self._place.url} was trained with; use the same pretrained folder and "
                "train.seed, or another --name"
            )

    def _check_quantised(self, manifest: Manifest) -> None:
        """Raise SpecError if quantised optimizer states would have to be quantised again.

        States are quantised in blocks that begin with each shard, so the number of shards must not
        change.
        """
        before, now = (table.get("job", {}).get("optimizer") for table in (manifest.run, self._run))
        if before != now and (before in LOW_BIT or now in LOW_BIT):
            raise SpecError(
                f"job.optimizer: was {before!r} when step {manifest.step} was saved and is {now!r} "
                "now; set it back, or use another --name"
            )
        saved, own = (_shards(table) for table in (manifest.run, self._run))
        if now in LOW_BIT and saved != own:
            raise SpecError(
                f"strategy: step {manifest.step} was saved with parameters in {saved} shards and "
                f"would resume in {own}; {now} resumes on the same number, so set it back, or use "
                "another --name"
            )

    def is_due(self, step: int) -> bool:
        """Whether this rank wants a checkpoint after `step` steps: by number, or rank 0 by time."""
        settings = self._settings
        if settings.every and step % settings.every == 0:
            return True
        # Only rank 0's clock decides, and only when no save is in progress.
        free = self._rank == 0 and not self._saver.busy
        return free and self._pace.is_due(time.monotonic())

    def is_best(self, found: Evaluated) -> bool:
        """Whether to save now, because this held-out loss is the lowest so far."""
        return self._keeps_best and (self._best is None or found.loss < self._best.loss)

    def save(self, rank_state: Mapping[str, torch.Tensor], unchanged: bool = False) -> None:
        """Start to save the training, unless its current step is saved; waits for the save before.

        `rank_state` is the state of this rank alone. Waits for this save too, without
        train.checkpoint.background and unless parameters stay `unchanged` until `finish`.
        """
        t = self._training
        if t.step == self._saved:
            return
        found = t.evaluated if t.evaluated is not None and t.evaluated.step == t.step else None
        manifest = Manifest(
            step=t.step,
            world=self._world,
            sequences=t.batches.layout.sequences_before(t.step),
            run=self._run,
            versions={**versions(), **_SYNTHETIC},
            base=base_digest(t.model),
            eval_loss=found.loss if found is not None and math.isfinite(found.loss) else None,
        )
        own = state.rank_state(self._rank, t.device, {**rank_state, **compression_state(t.model)})
        self._finish_save()
        if found is not None and self.is_best(found):
            self._best = Best(t.step, found.loss)
        self._saver.best = self._best.step if self._best is not None else None
        self._pace.saved(time.monotonic())
        self._saved, self._failure = t.step, None
        updated, buffers = state.updated_tensors(t.model, t.optimizer), state.buffers_of(t.model)
        self._saver.save(updated, buffers, own, manifest, unchanged)
        if not self._settings.background and not unchanged:
            self._finish_save()

    def leave_save(self) -> None:
        """Count the current step as saved, because another replica group saves it."""
        self._pace.saved(time.monotonic())
        report(saved=self._training.step)

    def wait_until_copied(self) -> None:
        """Wait until parameters may change without changing the save in progress."""
        self._saver.wait_until_copied()
        self._report_saved()

    def finish(self) -> None:
        """Wait for the last save; raise SaveError if it failed."""
        self._finish_save()
        if self._failure is not None:
            raise self._failure

    def _finish_save(self) -> None:
        """Wait for the save in progress.

        A failed save is only logged and remembered: the checkpoint before it remains.
        """
        try:
            self._saver.wait()
        except SaveError as error:
            self._failure, self._saved = error, None
            self._best = self._complete_best
            if self._rank == 0:
                log.warning("%s", error)
        self._complete_best = self._best
        self._report_saved()

    def _report_saved(self) -> None:
        """Report the last saved step to the supervisor, as progress of the run."""
        if self._saver.last is not None:
            report(saved=self._saver.last)
