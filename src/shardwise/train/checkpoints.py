"""Keep a training: save it between steps, and go on from the last save that is whole."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.checkpoint.dcp import state
from shardwise.checkpoint.dcp.load import Loaded, load_last
from shardwise.checkpoint.dcp.save import SaveError, Saver
from shardwise.checkpoint.format.folder import is_remote
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.format.pieces import Saved
from shardwise.checkpoint.format.place import Place
from shardwise.checkpoint.format.run_folder import place_in
from shardwise.engine.mesh import world
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec, run_table
from shardwise.train.folder import versions
from shardwise.train.heartbeat import beat
from shardwise.train.loop import Training

log = logging.getLogger("shardwise")
# What decides which samples come in which order, by section.
_ORDER = {
    "job": ("seq_len",),
    "train": ("seed",),
    "data": ("path", "source", "tokenizer", "shuffle"),
}


def _check_shared(place: Place) -> None:
    """Every rank writes there, and one commits for all."""
    if is_remote(place.url):
        return
    (rank, size), probe = world(), Path(place.url, ".shared")
    told = [""]
    if rank == 0:
        try:
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.touch()
        except OSError as error:
            told = [f"{place.url} cannot be written: {error.strerror or error}"]
    if size > 1:
        dist.broadcast_object_list(told)
    seen = [probe.exists()] * size
    if size > 1:
        dist.all_gather_object(seen, seen[0])
    if rank == 0:
        probe.unlink(missing_ok=True)
    if not told[0] and not all(seen):
        told = [f"rank {seen.index(False)} does not see {place.url} of rank 0"]
    if told[0]:
        raise SpecError(
            f"train.checkpoint: {told[0]}; set train.checkpoint.to to a folder that all machines "
            "can write, or to an object store"
        )


def _name(value: object) -> object:
    """Files may have moved; what they are called is what they are."""
    if isinstance(value, list | tuple):
        return [_name(one) for one in value]
    return Path(value).name if isinstance(value, str) else value


class RunCheckpoints:
    """The checkpoints of one run, on one rank."""

    def __init__(self, run: RunSpec, training: Training, folder: Path) -> None:
        self._training = training
        self._settings = training.settings.checkpoint
        self._rank, self._world = world()
        self._place = place_in(folder, self._settings.to)
        _check_shared(self._place)
        self._saver = Saver(self._place, self._settings.keep, self._settings.background)
        self._run = run_table(run)
        self._saved_at = time.monotonic()
        self._saved: int | None = None
        self._failure: SaveError | None = None

    def load(self) -> Loaded | None:
        """Go on from the last save that is whole; None where there is none. All ranks call this."""
        loaded = load_last(self._place, self._room)
        if loaded is None:
            beat(loaded=-1)
            return None
        t, told = self._training, loaded.manifest
        t.step = self._saved = told.step
        t.batches.go_on(told.step, told.sequences)
        if told.world == self._world:
            prefix = f"{state.OWN}.{self._rank}."
            t.own = {name.removeprefix(prefix): tensor for name, tensor in self._own.items()}
            # Last: to pass over data may draw random numbers.
            state.restore_random(t.own, t.device)
        beat(loaded=told.step, saved=told.step)
        return loaded

    def _room(self, told: Manifest, saved: Saved) -> Mapping[str, torch.Tensor]:
        t = self._training
        self._check_order(told)
        state.make_optimizer_state(t.model, t.optimizer, saved.tensors)
        wanted = {**state.updated(t.model, t.optimizer), **state.buffers_of(t.model)}
        for name, tensor in wanted.items():
            found = saved.tensors.get(name)
            if found is None or found.shape != tuple(tensor.shape):
                shape = list(found.shape) if found is not None else "not there"
                raise SpecError(
                    f"checkpoint: {name} is {shape} in step {told.step} of {self._place.url} and "
                    f"{list(tensor.shape)} in this model; train another model under another --name"
                )
        self._own = state.own_room(saved.tensors, self._rank) if told.world == self._world else {}
        return {**wanted, **self._own}

    def _check_order(self, told: Manifest) -> None:
        """Another order of samples would repeat some and leave out others."""
        for section, keys in _ORDER.items():
            for key in keys:
                before, now = (
                    _name(table.get(section, {}).get(key)) for table in (told.run, self._run)
                )
                if before != now:
                    raise SpecError(
                        f"{section}.{key}: was {before!r} when step {told.step} was saved and is "
                        f"{now!r} now; set it back, or train under another --name"
                    )

    def wanted(self, step: int) -> bool:
        settings = self._settings
        if settings.every and step % settings.every == 0:
            return True
        # One clock decides, and no save piles up behind one that is under way.
        due = settings.minutes and time.monotonic() - self._saved_at > 60 * settings.minutes
        return bool(self._rank == 0 and due and not self._saver.busy)

    def save(self, own: Mapping[str, torch.Tensor]) -> None:
        t = self._training
        if t.step == self._saved:
            return
        about = Manifest(
            step=t.step,
            world=self._world,
            sequences=t.batches.layout.sequences_before(t.step),
            run=self._run,
            versions=versions(),
        )
        others = {
            **state.buffers_of(t.model),
            **state.own_state(self._rank, t.device, own),
        }
        self._done()
        self._saved_at, self._saved, self._failure = time.monotonic(), t.step, None
        self._saver.save(state.updated(t.model, t.optimizer), others, about)
        if not self._settings.background:
            self._done()

    def settle(self) -> None:
        self._saver.settle()
        self._tell()

    def finish(self) -> None:
        """Raises SaveError if what was saved last is not there."""
        self._done()
        if self._failure is not None:
            raise self._failure

    def _done(self) -> None:
        """A save that failed is told, and the run goes on: the one before is still there."""
        try:
            self._saver.wait()
        except SaveError as error:
            self._failure, self._saved = error, None
            if self._rank == 0:
                log.warning("%s", error)
        self._tell()

    def _tell(self) -> None:
        """Whoever watches knows by this that a run makes progress."""
        if self._saver.last is not None:
            beat(saved=self._saver.last)
