"""Which hosts train together: the rounds of a run, decided in one place.

Every launcher posts its state about once a second and gets a view of the others back. A round is a
list of hosts that train together. A new one is decided when no host of the last one still trains
and enough hosts wait. Only this process's clock counts, so the clocks of hosts need not agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from shardwise.spec.foreign_text import one_line

# Hosts that train reconnect within this time to a server that was restarted.
_RECONNECT_S = 3.0
# Hosts accept a round within this time.
_ACCEPT_S = 10.0
# With at most _FEW hosts, a post is answered from the current state of all hosts. With more, from a
# state up to _SUMMARY_S seconds old, so that the cost of an answer does not grow with the hosts.
_FEW, _SUMMARY_S = 64, 0.2
# Posts per second that a server can answer with time to spare.
_POSTS_PER_S = 2000
# Seconds in which all hosts of a round learn that others can join, plus the time between posts.
_ANNOUNCE_S = 2.0
# The most waiting hosts that a view names.
_MAX_NAMED_HOSTS = 9
# States of a host. "starting": it accepted a round that others have not accepted yet. "left": the
# run continues without it. "done" and "failed": the run has this state.
WAITING: Final = "waiting"
STARTING: Final = "starting"
TRAINING: Final = "training"
LEFT: Final = "left"
DONE: Final = "done"
FAILED: Final = "failed"
_TRAINING_STATES = (STARTING, TRAINING)
State = Literal["waiting", "starting", "training", "left", "done", "failed"]

# Allowed values of messages. The sender cuts and cleans text.
_MAX_TEXT_LENGTH = 1000
Text = Annotated[str, Meta(max_length=_MAX_TEXT_LENGTH)]
Word = Annotated[str, Meta(max_length=255, pattern=r"^[A-Za-z0-9_.:%-]*$")]
Number = Annotated[int, Meta(ge=0, le=2**52)]
HostCount = Annotated[int, Meta(ge=0, le=1_000_000)]
HostIndex = Annotated[int, Meta(ge=-1, le=1_000_000)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(ge=0, le=1e7)]


class InvalidPostError(ValueError):
    """A message with values that no launcher sends."""


class Post(NamedTuple):
    """The state of a host, as its launcher sends it to the server."""

    # Unique per launcher process.
    host: Word
    name: Text
    address: Word
    # None under torchrun, which does not tell the number.
    processes: Annotated[int, Meta(ge=1, le=100_000)] | None
    # Numbers of hosts on which the run can train.
    sizes: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=1_000_000)], ...], Meta(min_length=1, max_length=100_000)
    ]
    last_call_s: Seconds
    state: State = WAITING
    # The last round that this host took part in, its place there, and the hosts of that round.
    round: Number = 0
    place: HostIndex = -1
    size: HostCount = 0
    # Where the ranks of this round meet; set by the first host.
    port: Port = 0
    step: Number = 0
    section: Text = ""
    # Whether all ranks of this host wait in a collective.
    waits: bool = False
    # Why its ranks failed, and whether they failed by themselves or lost those of another host.
    # A host that trains may say so before it waits for a new round.
    failure: Text = ""
    lost_peer: bool = False

    def encode(self, number: int) -> bytes:
        """The post with its `number` as JSON."""
        texts: dict[str, Any] = {
            one: one_line(getattr(self, one))[:_MAX_TEXT_LENGTH] for one in _TEXT_FIELDS
        }
        return msgspec.json.encode((number, self._replace(**texts)))

    @staticmethod
    def decode(data: bytes) -> tuple[int, Post]:
        """The number of a post, and the post, from JSON.

        Raises:
            InvalidPostError: The message has values that no launcher sends.
        """
        try:
            number, post = _POST_DECODER.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidPostError(str(error)) from None
        if any(one_line(getattr(post, one)) != getattr(post, one) for one in _TEXT_FIELDS):
            raise InvalidPostError("text with characters that are not shown")
        has_place = post.place >= 0
        if post.state in _TRAINING_STATES and not has_place:
            raise InvalidPostError("a host that trains has a place")
        if has_place and not (post.round and post.place < post.size <= max(post.sizes)):
            raise InvalidPostError("a place outside of the round")
        return number, post


_TEXT_FIELDS = ("name", "section", "failure")
_POST_DECODER = msgspec.json.Decoder(tuple[Number, Post])


class Fault(NamedTuple):
    """A host of the round that no longer trains; if `sure`, it will not continue by itself."""

    name: str
    cause: str
    sure: bool
    lost_peer: bool = False


class View(NamedTuple):
    """The server's answer to a post: the round, and the state of the other hosts."""

    # The number of the post that this answers, and the server process that answers.
    answers: int
    server: str
    # The current round, the number of its hosts, and the place of this one; -1 if it has none.
    round: int
    size: int
    place: int
    # Whether all hosts of the round have accepted it, and where their ranks meet.
    ready: bool
    meets_at: tuple[Word, Port]
    # Faults of this round; who is to blame for the end of the round before.
    faults: tuple[Fault, ...]
    blamed: Fault | None
    # How many other hosts wait, names of some, and whether the run would be larger with them.
    waiting: int
    waiting_names: tuple[str, ...]
    can_grow: bool
    # Hosts of this round that still train; the furthest behind of those whose ranks do not wait.
    training: int
    behind: str
    # Whether the run has ended, and why if it failed.
    ended: bool
    failure: str
    # Seconds to the next post, unless the state of the host changes; more with many hosts.
    post_after_s: Seconds
    # If the run can grow: seconds until all hosts of the round have learned of it.
    grow_after_s: Seconds = 0.0

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def decode(data: bytes) -> View:
        """Read a view of a server that has proved itself; raise ValueError for anything else."""
        return _VIEW_DECODER.decode(data)


_VIEW_DECODER = msgspec.json.Decoder(View)


@dataclass
class _Host:
    post: Post
    arrived: float


class _Summary(NamedTuple):
    """The part of a view that is equal for all hosts; computed again when it may have changed."""

    at: float
    ready: bool
    # The first host of the round, if it has accepted it.
    first: Post | None
    # Hosts of the round that train, and those whose ranks do not wait, the furthest behind first.
    training: frozenset[str]
    behind: tuple[Post, ...]
    waiting: tuple[_Host, ...]
    in_use: bool


class Membership:
    """The hosts of one run: which of them form the current round, and which wait."""

    def __init__(self, server: str, clock: Callable[[], float], first_round: int = 1) -> None:
        """`first_round` must be larger than every round number of an earlier server."""
        self._server, self._clock = server, clock
        self._opened = self._begun_at = clock()
        self._hosts: dict[str, _Host] = {}
        self._round, self._next_round = 0, first_round
        # Whether this server has decided the round, and not learned it from a host.
        self._has_decided = False
        # The hosts of the round with their places, and how many there are: a server that was
        # restarted learns them one by one.
        self._members: dict[str, int] = {}
        self._size = 0
        self._summary: _Summary | None = None
        self._faults: dict[str, Fault] = {}
        self._blamed: Fault | None = None
        self._ended, self._failure = False, ""
        # When hosts may restart to let others join, if those wait.
        self._grow_at: float | None = None

    @property
    def is_empty(self) -> bool:
        return not self._hosts

    def post(self, post: Post, number: int = 0) -> View:
        """Record the state of a host, and begin a new round if it is time.

        Returns the view of the other hosts that answers the post.
        """
        if (problem := self._mismatch(post)) is not None:
            return self._view_of(post, number)._replace(ended=True, failure=problem)
        known = self._hosts.get(post.host)
        self._hosts[post.host] = _Host(post, known.arrived if known else self._clock())
        if not self._has_decided:
            self._learn(post)
        self._note_fault(post)
        # Only hosts that train decide how the run ends.
        if post.host in self._members and post.round == self._round:
            if post.state == DONE:
                self._ended = True
            elif post.state == FAILED:
                self._ended, self._failure = True, f"host {post.name}: {post.failure}"
        self._decide()
        self._announce_growth()
        return self._view_of(post, number)

    def _learn(self, post: Post) -> None:
        """Learn a round that an earlier server has decided, from a host that takes part."""
        if post.round > self._round:
            self._begin(post.round, {}, post.size)
        fits = post.round == self._round and 0 <= post.place < self._size == post.size
        is_new = fits and post.host not in self._members
        if is_new and post.place not in self._members.values():
            self._members[post.host] = post.place

    def _mismatch(self, post: Post) -> str | None:
        """Why a host cannot train with the others, as a sentence; None if it can.

        It is compared with the first host, which all others match.
        """
        one = next(iter(self._hosts.values()), None)
        if one is None or one.post.processes == post.processes:
            return None
        if one.post.processes is None or post.processes is None:
            return (
                f"torchrun started one of the hosts {post.name} and {one.post.name}, "
                "`shardwise train` the other; use the same command on all hosts"
            )
        return (
            f"host {post.name} starts {post.processes} processes, {one.post.name} starts "
            f"{one.post.processes}; use the same --nproc on all hosts"
        )

    def lose(self, host: str, cause: str, sure: bool) -> None:
        """Forget a host whose connection is closed or silent; it may connect again."""
        lost, self._summary = self._hosts.pop(host, None), None
        if lost is None or host not in self._members:
            return
        accepted = lost.post.round == self._round
        if accepted and lost.post.state not in _TRAINING_STATES:
            return  # it had failed before
        where = f" (step {lost.post.step}, section {lost.post.section})" if lost.post.step else ""
        self._faults[host] = Fault(lost.post.name, cause + where, sure)

    def _note_fault(self, post: Post) -> None:
        """Record that a host of the round has failed, or that it trains after all."""
        if post.host not in self._members or post.round != self._round:
            return
        # A host that was cut off lost the others, who blame it.
        known = post.lost_peer and post.host in self._faults
        failed = post.state in (TRAINING, WAITING, LEFT, FAILED) and post.failure != ""
        if failed and not known:
            self._faults[post.host] = Fault(post.name, post.failure, True, post.lost_peer)
        elif post.state == TRAINING and not failed:
            # Its connection to this server had failed, not the host.
            self._faults.pop(post.host, None)

    def _begin(self, number: int, members: dict[str, int], size: int) -> None:
        """Begin a round, and choose the host to blame for the end of the last one."""
        # A host whose ranks only lost others is not to blame.
        faults = [fault for fault in self._faults.values() if not fault.lost_peer]
        self._blamed = min(faults, key=lambda fault: not fault.sure, default=None)
        self._round, self._members, self._size, self._faults = number, members, size, {}
        self._next_round = max(self._next_round, number + 1)
        self._begun_at, self._summary = self._clock(), None

    def _decide(self) -> None:
        """Begin a round with as many waiting hosts as the run can use, once it is time."""
        now, known, summary = self._clock(), self._summary, self._summarise()
        if summary is known:
            return  # nothing has changed
        if self._ended or summary.in_use or now - self._opened < _RECONNECT_S:
            return
        size = self._next_size(summary.waiting, 0)
        if not size:
            return
        # Hosts keep their ranks where they can; spares come after them.
        last = self._size
        order = sorted(
            summary.waiting,
            key=lambda one: (self._members.get(one.post.host, last), one.arrived),
        )
        members = {one.post.host: place for place, one in enumerate(order[:size])}
        self._begin(self._next_round, members, size)
        self._has_decided = True

    def _summarise(self) -> _Summary:
        """The summary of all hosts: current for few hosts, up to _SUMMARY_S old for many."""
        now, known = self._clock(), self._summary
        oldest_s = _SUMMARY_S if len(self._hosts) > _FEW else 0.0
        if known is not None and now - known.at < oldest_s:
            return known
        is_new = now - self._begun_at < max(_ACCEPT_S, 3 * self._post_after_s)
        present = [one.post for one in self._hosts.values() if one.post.host in self._members]
        mates = [one for one in present if one.round == self._round]
        trains = [one for one in mates if one.state == TRAINING]
        busy = sorted((one for one in trains if not one.waits), key=lambda one: one.step)
        self._summary = _Summary(
            at=now,
            ready=0 < self._size == sum(one.state != WAITING for one in mates),
            first=next((one for one in mates if self._members[one.host] == 0), None),
            training=frozenset(one.host for one in trains),
            behind=tuple(busy[:2]),
            waiting=tuple(one for one in self._hosts.values() if one.post.state == WAITING),
            # A host trains in the current round, or is about to accept it.
            in_use=any(
                one.state in _TRAINING_STATES if one.round == self._round else is_new
                for one in present
            ),
        )
        return self._summary

    def _next_size(self, waiting: Sequence[_Host], training: int) -> int:
        """The number of hosts of the next round; 0 if it is too early or they are too few.

        The hosts are those that wait and `training` others.
        """
        if not waiting:
            return 0
        post, newest = waiting[0].post, max(one.arrived for one in waiting)
        size = largest_size(post.sizes, training + len(waiting))
        is_last_call = self._clock() - newest < post.last_call_s
        return 0 if is_last_call and size < max(post.sizes) else size

    def _view_of(self, post: Post, number: int) -> View:
        """The view of the other hosts for this post."""
        summary = self._summarise()
        others = [one for one in summary.waiting[:_MAX_NAMED_HOSTS] if one.post.host != post.host]
        is_waiting = post.state == WAITING and post.host in self._hosts
        behind = next((one for one in summary.behind if one.host != post.host), None)
        first = summary.first
        can_grow = summary.ready and self._can_grow(summary, post)
        return View(
            answers=number,
            server=self._server,
            round=self._round,
            size=self._size,
            place=self._members.get(post.host, -1),
            ready=summary.ready,
            meets_at=(first.address, first.port) if first else ("", 0),
            faults=tuple(fault for host, fault in self._faults.items() if host != post.host),
            blamed=self._blamed,
            waiting=len(summary.waiting) - is_waiting,
            waiting_names=tuple(one.post.name for one in others),
            can_grow=can_grow,
            training=len(summary.training) - (post.host in summary.training),
            behind=f"{behind.name} in step {behind.step}" if behind else "",
            ended=self._ended,
            failure=self._failure,
            post_after_s=self._post_after_s,
            grow_after_s=max(0.0, (self._grow_at or 0.0) - self._clock()),
        )

    @property
    def _post_after_s(self) -> float:
        """Seconds after which a host should post again, by the number of hosts."""
        return len(self._hosts) / _POSTS_PER_S

    def _can_grow(self, summary: _Summary, post: Post) -> bool:
        """Whether the hosts that wait, without this one, would make the round larger."""
        waiting = [one for one in summary.waiting if one.post.host != post.host]
        return self._next_size(waiting, self._size) > self._size

    def _announce_growth(self) -> None:
        """Set when all hosts restart to let others join, or that they do not.

        They need a common time: ranks whose peers restart earlier would fail.
        """
        summary = self._summarise()
        if not (summary.ready and self._next_size(summary.waiting, self._size) > self._size):
            self._grow_at = None
        elif self._grow_at is None:
            self._grow_at = self._clock() + _ANNOUNCE_S + 2 * self._post_after_s


def largest_size(sizes: Sequence[int], hosts: int) -> int:
    """The largest number of hosts that the run can use; 0 if there are too few."""
    return max((size for size in sizes if size <= hosts), default=0)
