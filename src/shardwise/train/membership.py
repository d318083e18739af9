"""Which hosts train together: the rounds of a run, decided in one place.

Every launcher posts its state about once a second and gets a view of the others back. A round is a
list of hosts that train together. A new one is decided when no host of the last one still trains
and enough hosts wait. Only this process's clock counts, so the clocks of hosts need not agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# Hosts that train reconnect within this time to a server that was restarted.
_RECONNECT_S = 3.0
# Hosts accept a round within this time.
_ACCEPT_S = 10.0
# States of a host. "starting": it accepted a round that others have not accepted yet. "left": the
# run goes on without it. "done" and "failed": so is the run.
WAITING, STARTING, TRAINING = "waiting", "starting", "training"
LEFT, DONE, FAILED = "left", "done", "failed"
_TRAINS = (STARTING, TRAINING)


class Post(NamedTuple):
    """What a launcher says about its host."""

    # Unique per launcher process.
    host: str
    name: str
    address: str
    processes: int
    # Numbers of hosts on which the run can train.
    sizes: tuple[int, ...]
    last_call_s: float
    state: str = WAITING
    # The last round that this host took part in, and its hosts.
    round: int = 0
    members: tuple[str, ...] = ()
    # Where the ranks of this round meet; set by the first host.
    port: int = 0
    step: int = 0
    section: str = ""
    # Whether all ranks of this host wait in a collective.
    waits: bool = False
    # Why its ranks failed, and whether they failed by themselves or lost those of another host.
    failure: str = ""
    lost_peer: bool = False

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Post:
        """Raises ValueError or TypeError if it is not a post."""
        post = cls(**values)
        post = post._replace(sizes=tuple(post.sizes), members=tuple(post.members))
        numbers = (*post.sizes, post.processes, post.round, post.port, post.step, post.last_call_s)
        if not post.sizes or not all(isinstance(one, int | float) for one in numbers):
            raise ValueError("a post needs sizes and numbers")
        return post


class Fault(NamedTuple):
    """A host of the round that no longer trains. A `sure` one will not go on by itself."""

    name: str
    cause: str
    sure: bool
    lost_peer: bool = False


class View(NamedTuple):
    """What a launcher is told. Other hosts only: its own state it knows itself."""

    # The number of the post that this answers, and the server process that answers.
    answers: int
    server: str
    round: int
    members: tuple[str, ...]
    # Whether all hosts of the round have accepted it, and where their ranks meet.
    ready: bool
    meets_at: tuple[str, int]
    # Faults of this round; who is to blame for the end of the round before.
    faults: tuple[Fault, ...]
    blamed: Fault | None
    # Names of hosts that wait, and whether the run would be larger with them.
    waiting: tuple[str, ...]
    can_grow: bool
    # Hosts of this round that still train; the furthest behind of those whose ranks do not wait.
    training: int
    behind: str
    # Whether the run has ended, and why if it failed.
    ended: bool
    failure: str

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> View:
        view = cls(**values)
        return view._replace(
            members=tuple(view.members),
            meets_at=(view.meets_at[0], view.meets_at[1]),
            faults=tuple(Fault(*one) for one in view.faults),
            blamed=Fault(*view.blamed) if view.blamed else None,
            waiting=tuple(view.waiting),
        )


@dataclass
class _Host:
    post: Post
    arrived: float


class Membership:
    """The hosts of one run."""

    def __init__(self, server: str, clock: Callable[[], float]) -> None:
        self._server, self._clock = server, clock
        self._opened = self._begun_at = clock()
        self._hosts: dict[str, _Host] = {}
        self._round = 0
        self._members: tuple[str, ...] = ()
        self._faults: dict[str, Fault] = {}
        self._blamed: Fault | None = None
        self._ended, self._failure = False, ""

    @property
    def is_empty(self) -> bool:
        return not self._hosts

    def post(self, post: Post, number: int = 0) -> View:
        """Note the state of a host; decide a new round if it is time; return what others do."""
        if (problem := self._mismatch(post)) is not None:
            return self._view_of(post, number)._replace(ended=True, failure=problem)
        known = self._hosts.get(post.host)
        self._hosts[post.host] = _Host(post, known.arrived if known else self._clock())
        if post.round > self._round:
            # This server was started after that round.
            self._begin(post.round, post.members)
        self._note_fault(post)
        if post.state == DONE:
            self._ended = True
        elif post.state == FAILED:
            self._ended, self._failure = True, f"host {post.name}: {post.failure}"
        self._decide()
        return self._view_of(post, number)

    def _mismatch(self, post: Post) -> str | None:
        """Why a host cannot train with the others."""
        for one in self._hosts.values():
            if one.post.processes != post.processes:
                return (
                    f"host {post.name} starts {post.processes} processes, {one.post.name} starts "
                    f"{one.post.processes}; use the same --nproc on all hosts"
                )
        return None

    def lose(self, host: str, cause: str, sure: bool) -> None:
        """Forget a host whose connection is closed or silent; it may come back."""
        lost = self._hosts.pop(host, None)
        if lost is None or host not in self._members:
            return
        accepted = lost.post.round == self._round
        if accepted and lost.post.state not in _TRAINS:
            return  # it had failed before
        where = f" (step {lost.post.step}, section {lost.post.section})" if lost.post.step else ""
        self._faults[host] = Fault(lost.post.name, cause + where, sure)

    def _note_fault(self, post: Post) -> None:
        if post.host not in self._members or post.round != self._round:
            return
        # A host that was cut off lost the others, who blame it.
        known = post.lost_peer and post.host in self._faults
        if post.state in (WAITING, FAILED) and post.failure and not known:
            self._faults[post.host] = Fault(post.name, post.failure, True, post.lost_peer)
        elif post.state == TRAINING:
            # Its connection to this server had failed, not the host.
            self._faults.pop(post.host, None)

    def _begin(self, number: int, members: tuple[str, ...]) -> None:
        # A host whose ranks only lost others is not to blame.
        faults = [fault for fault in self._faults.values() if not fault.lost_peer]
        self._blamed = min(faults, key=lambda fault: not fault.sure, default=None)
        self._round, self._members, self._faults = number, members, {}
        self._begun_at = self._clock()

    def _decide(self) -> None:
        """Begin a round with as many waiting hosts as the run can use, once it is time."""
        now = self._clock()
        if self._ended or self._is_in_use(now) or now - self._opened < _RECONNECT_S:
            return
        waiting = [one for one in self._hosts.values() if one.post.state == WAITING]
        size = self._next_size(waiting, 0)
        if not size:
            return
        # Hosts keep their ranks where they can; spares come after them.
        place = {host: number for number, host in enumerate(self._members)}
        waiting.sort(key=lambda one: (place.get(one.post.host, len(place)), one.arrived))
        self._begin(self._round + 1, tuple(one.post.host for one in waiting[:size]))

    def _is_in_use(self, now: float) -> bool:
        """Whether a host trains in the current round, or is about to accept it."""
        members = [one.post for one in self._hosts.values() if one.post.host in self._members]
        is_new = now - self._begun_at < _ACCEPT_S
        return any(one.state in _TRAINS if one.round == self._round else is_new for one in members)

    def _next_size(self, waiting: Sequence[_Host], training: int) -> int:
        """How many hosts the next round would have; 0 if it is too early or they are too few."""
        if not waiting:
            return 0
        post, newest = waiting[0].post, max(one.arrived for one in waiting)
        size = largest_size(post.sizes, training + len(waiting))
        is_last_call = self._clock() - newest < post.last_call_s
        return 0 if is_last_call and size < max(post.sizes) else size

    def _view_of(self, post: Post, number: int) -> View:
        others = [one.post for one in self._hosts.values() if one.post.host != post.host]
        mates = [one for one in others if one.host in self._members and one.round == self._round]
        present = [one for one in (*mates, post) if one.host in self._members]
        accepted = [one for one in present if one.round == self._round and one.state != WAITING]
        waiting = [one for one in self._hosts.values()
                   if one.post.state == WAITING and one.post.host != post.host]  # fmt: skip
        ready = len(accepted) == len(self._members)
        first = self._hosts.get(self._members[0]) if self._members else None
        leads = first is not None and first.post.round == self._round
        trains = [one for one in mates if one.state == TRAINING]
        busy = (one for one in trains if not one.waits)
        behind = min(busy, key=lambda one: one.step, default=None)
        return View(
            answers=number,
            server=self._server,
            round=self._round,
            members=self._members,
            ready=ready,
            meets_at=(first.post.address, first.post.port) if first and leads else ("", 0),
            faults=tuple(fault for host, fault in self._faults.items() if host != post.host),
            blamed=self._blamed,
            waiting=tuple(one.post.name for one in waiting),
            can_grow=ready and self._next_size(waiting, len(accepted)) > len(self._members),
            training=len(trains),
            behind=f"{behind.name} in step {behind.step}" if behind else "",
            ended=self._ended,
            failure=self._failure,
        )


def largest_size(sizes: Sequence[int], hosts: int) -> int:
    """The largest number of hosts that the run can use; 0 if there are too few."""
    return max((size for size in sizes if size <= hosts), default=0)
