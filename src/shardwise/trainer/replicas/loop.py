"""Train as one of several replica groups; any may fail and return while the others train on.

The groups that are present make a step together. Before it they exchange their states (the roll
call), and they commit it together after its gradients are averaged. If a group is lost in between,
the others repeat the step without it. A group that returns loads the last checkpoint and then
receives the current state of another group.

After the last step, groups continue with roll calls while one of them saves, however long that
takes: a lost group is noticed within seconds, and another one saves.

Everything else stays inside a group: agreement, gradient norm, log lines. One group writes each
checkpoint, the first of those present, because all hold the same bits.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardwise.checkpoint.dcp.transport import TensorTransport
from shardwise.engine.annotate import DATA, annotated
from shardwise.engine.rank_tree import shared_tree
from shardwise.engine.replicas import HealingError, Replicas
from shardwise.launch.heartbeat import report, section
from shardwise.launch.rendezvous_address import replica_address
from shardwise.pytorch.device import random_states, set_random_states
from shardwise.trainer.agree import Agreement, Reason
from shardwise.trainer.checkpoints import RunCheckpoints
from shardwise.trainer.clock import StepClock
from shardwise.trainer.data.batches import MicroBatch
from shardwise.trainer.loop import (
    SETTLED,
    LogWindow,
    Saver,
    StepObserver,
    Training,
    Update,
    is_logged,
)
from shardwise.trainer.optimizer import clear_gradients
from shardwise.trainer.replicas.changes import Changes
from shardwise.trainer.replicas.group import ReplicaGroup
from shardwise.trainer.replicas.roll_call import Entry, RollCall, call_roll
from shardwise.trainer.replicas.state import HealingState
from shardwise.trainer.stop_signal import stop_on_signal

# Seconds between two attempts to meet all groups at the start.
_TRY_EVERY_S = 0.5


class _Prepared(NamedTuple):
    """This rank's batches after `step` completed steps, and its group's agreement on that step.

    `present` are the groups that share all batches; empty if each uses only its own.
    """

    step: int
    present: tuple[int, ...]
    batches: list[MicroBatch]
    agreement: Agreement


def train_in_group(
    training: Training,
    observer: StepObserver,
    checkpoints: RunCheckpoints,
    group: ReplicaGroup,
    digest: int,
    folder: Path,
) -> Reason:
    """Train to the last step as one of the replica groups; return why training ended.

    `digest` identifies the run: groups with another one are refused. Changes of the groups that are
    present are logged, and written to `folder`.
    """
    if training.step >= training.settings.steps:
        # The checkpoint that was loaded is the last one: the other groups may have left.
        return "done"
    with stop_on_signal() as received_signal:
        member = _Member(training, observer, checkpoints, group, digest, folder, received_signal)
        try:
            return member.train()
        finally:
            member.close()


class _Member:
    """The training loop of one rank in a replica group."""

    def __init__(
        self,
        training: Training,
        observer: StepObserver,
        checkpoints: RunCheckpoints,
        group: ReplicaGroup,
        digest: int,
        folder: Path,
        received_signal: Callable[[], int | None],
    ) -> None:
        self._training, self._observer, self._checkpoints = training, observer, checkpoints
        self._group, self._digest, self._received_signal = group, digest, received_signal
        self._settings = training.settings.restart
        self._window = LogWindow(training.device, training.rank_state)
        self._saver = Saver(training, self._window, checkpoints)
        self._update = Update(training, self._window, self._saver)
        self._clock = StepClock(training.device)
        self._changes = Changes(group, self._settings.absent_batches, folder)
        self._first, self._tries = training.step, 1
        self._current: _Prepared | None = None
        self._ahead: _Prepared | None = None
        self._reason: Reason | None = None
        self._saves_last = self._is_closed = False
        self._state = HealingState(training, self._window, digest)
        address = replica_address(self._settings)
        with section("replicas", slow=True):
            self._replicas = Replicas(
                group.number,
                self._settings,
                address,
                training.device,
                TensorTransport(address, self._state.allocate),
                self._state.tensors,
                self._load,
            )
        self._replicas.start_at(training.step)
        self._replicas.average_gradients(training.model)

    def train(self) -> Reason:
        """Train until the run is complete and saved, or this group ends; return why."""
        last = self._training.settings.steps
        while self._reason is None and not self._is_closed:
            self._meet()
            if self._training.step < last:
                self._train_step(last)
            else:
                self._close_run()
        self._saver.finish()
        return self._reason or "done"

    def close(self) -> None:
        self._replicas.close()

    def _load(self, received: Mapping[str, torch.Tensor]) -> None:
        """Replace the state of this rank by the state that another group sent."""
        # A save may still copy what is replaced.
        self._saver.wait_until_copied()
        before = self._training.step
        self._state.load(received)
        self._changes.healed(before, self._training.step)

    def _meet(self) -> None:
        """Meet the other groups, and continue at the same step on all ranks of this one.

        Raises:
            HealingError: Some ranks received the state of another group, and others did not.
        """
        if self._ahead is not None:
            # Started during the last step. Other collectives of the group begin after its end.
            with section("agree", slow=True):
                self._ahead.agreement.result()
        with section("replicas", slow=True):
            if not self._replicas.wait_for_groups():
                return
            step = self._training.step
            bounds = torch.tensor([-step, step])
            shared_tree().all_reduce(bounds, dist.ReduceOp.MAX)
        least, largest = -int(bounds[0]), int(bounds[1])
        if least < largest:
            raise HealingError(
                "The state of another replica group did not arrive on every rank: some are at step "
                f"{largest} and some at step {least}"
            )

    # ---- a step ----------------------------------------------------------------------------------

    def _train_step(self, last: int) -> None:
        """Train the next step with the groups that are present.

        If it could not be committed, `training.step` stays, and the caller tries again.
        """
        t = self._training
        number, slow = t.step + 1, t.step < self._first + SETTLED
        report(step=number)
        prepared = self._prepare_current(slow)
        with section("agree", slow):
            agreed = prepared.agreement.result()
        call = self._call_roll(agreed.tokens, agreed.stop)
        if call is None:
            self._repeat(number)
            return
        if agreed.end is not None:
            self._stop(agreed.end, call)
        if call.is_left_by_some or self._waits_for_others(call):
            return
        if agreed.save:
            self._save_if_first(call)
        random = random_states(t.device)
        with section("step", slow), self._observer.step(number):
            if number < last and self._ahead is None:
                self._ahead = self._prepare(number, slow)
            loss = self._update.gradients(prepared.batches, call.tokens, len(call.entries))
            if not self._replicas.commit():
                # A repeated step draws the same random numbers.
                set_random_states(random, t.device)
                clear_gradients(t.model, t.optimizer)
                self._changes.repeated(number, self._replicas.problem)
                return
            rate = self._update.apply(loss, agreed.tokens)
            self._clock.mark()
            logs = is_logged(number, t.settings)
            if logs:
                line = self._window.report(number, rate, self._clock.take())
        t.step, self._tries = number, 0
        self._changes.committed(number, tuple(call.entries))
        if logs:
            with section("log", slow=True):
                self._observer.logged(line)
            self._saver.check()

    def _repeat(self, number: int) -> None:
        """Tell torchft that the step cannot be committed, so that it removes lost groups."""
        self._replicas.commit()
        self._changes.repeated(number, self._replicas.problem)
        self._clock.skip()

    def _stop(self, end: Reason, call: RollCall) -> None:
        """Set why this group ends; if all groups end, the first one saves."""
        t = self._training
        self._reason = end
        t.stopped_by = self._received_signal() or signal.SIGTERM
        report(stopped_by=t.stopped_by or 0)
        if call.all_stop and t.step > self._first:
            self._save_if_first(call)

    def _waits_for_others(self, call: RollCall) -> bool:
        """Whether to meet again because groups are missing while all just start.

        If so, sleeps before it returns.
        """
        if not call.tries or len(call.entries) == self._group.total:
            return False
        self._tries = call.tries + 1
        if call.tries * _TRY_EVERY_S > self._settings.last_call_s:
            return False
        time.sleep(_TRY_EVERY_S)
        return True

    def _save_if_first(self, call: RollCall) -> None:
        """Save if this is the first of the groups that are present and nothing is saved yet.

        A repeated step may already be saved, by a group that was lost since.
        """
        if call.first == self._group.number and not self._is_saved():
            self._saver.save()
        else:
            self._checkpoints.leave_save()
        self._clock.skip()

    def _is_saved(self) -> bool:
        """Whether a complete checkpoint of the current step exists; all ranks call this."""
        with section("save", slow=True):
            return self._checkpoints.is_saved(self._training.step)

    def _close_run(self) -> None:
        """After the last step: end if it is saved; if no group saves it, the first one starts to.

        Called repeatedly, with one roll call each time.
        """
        # First, so that a save that has ended was either committed or has failed.
        saves = self._checkpoints.is_saving
        call = self._call_roll(saves=saves, saved=self._is_saved())
        if call is None:
            self._replicas.commit()
            # The lost group may have left because the step is saved.
            self._is_closed = self._is_saved()
        elif call.is_left_by_some:
            return
        elif call.is_saved:
            self._is_closed = True
            if not self._saves_last:
                self._checkpoints.leave_save()
        elif self._saves_last and not call.entries[self._group.number].saves:
            self._saver.finish()
        elif not call.has_saver and call.first == self._group.number:
            self._saver.save(unchanged=True)
            self._saves_last = True
        else:
            time.sleep(_TRY_EVERY_S)

    def _call_roll(
        self, tokens: int = 0, stops: bool = False, saves: bool = False, saved: bool = False
    ) -> RollCall | None:
        """Exchange entries with the other groups; None if one of them was lost."""
        with section("replicas", slow=True):
            entry = Entry(1, self._digest, tokens, stops, self._tries, saves, saved)
            return call_roll(self._replicas, self._group, entry)

    # ---- batches ---------------------------------------------------------------------------------

    def _prepare_current(self, slow: bool) -> _Prepared:
        """The next step's batches and agreement; kept if it is repeated with the same groups."""
        wanted = (self._training.step, self._data_groups())
        if self._current is not None and self._current[:2] == wanted:
            return self._current
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[:2] != wanted:
            if ahead is not None:
                ahead.agreement.result()
            ahead = self._prepare(self._training.step, slow)
        self._current = ahead
        return ahead

    def _prepare(self, completed: int, slow: bool) -> _Prepared:
        """Read the batches after `completed` steps, and start the agreement on that step."""
        with annotated(DATA), section("data", slow):
            batches = self._batches_at(completed)
        saves = completed > self._first and self._saver.is_due(completed)
        stops = self._received_signal() is not None
        agreement = Agreement(completed + 1, batches, stops, saves)
        return _Prepared(completed, self._data_groups(), batches, agreement)

    def _data_groups(self) -> tuple[int, ...]:
        """The groups that share all batches; empty if each uses only its own."""
        return self._replicas.present if self._settings.absent_batches == "given" else ()

    def _batches_at(self, completed: int) -> list[MicroBatch]:
        """This rank's micro-batches after `completed` steps.

        They include its share of those of absent groups, if absent batches are given to the others.
        """
        batches, present = self._training.batches, self._data_groups()
        if len(present) in (0, self._group.total):
            return batches.at(completed)
        layout = batches.layout
        try:
            shares = []
            for index in range(self._group.total):
                ranks = layout.world // self._group.total
                rank = layout.rank % ranks + index * ranks
                batches.layout = layout._replace(rank=rank)
                shares.append(batches.at(completed))
        finally:
            batches.layout = layout
        return given_share(shares, present.index(self._group.number), len(present))


def given_share(
    shares: Sequence[Sequence[MicroBatch]], place: int, present: int
) -> list[MicroBatch]:
    """The micro-batches of one present group, if the present groups train those of all groups.

    `shares` are the micro-batches of each group, present or absent; `place` is the index of this
    group among the `present` ones. With all present, a group gets its own.
    """
    in_order = [batch for at_once in zip(*shares, strict=True) for batch in at_once]
    return in_order[place::present]
