"""The rendezvous of several hosts: wait for a round, and watch the other hosts meanwhile.

Every wait has a deadline from `[train.restart]`, and a message says what it waits for. A thread of
the client talks to the server. The hosts of a round share a store on its first host, for torch's
agents and for the ranks.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import ClassVar

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from shardwise.launch.membership import (
    DONE,
    STARTING,
    TRAINING,
    WAITING,
    Fault,
    Post,
    State,
    View,
    largest_size,
)
from shardwise.launch.rendezvous_address import bind_address, endpoint, own_address
from shardwise.launch.rendezvous_client import Contact, RendezvousClient
from shardwise.launch.rendezvous_server import serve_if_local
from shardwise.launch.say import say
from shardwise.launch.shared_secret import secret_for
from shardwise.pytorch.channel import Secret
from shardwise.pytorch.store import new_store
from shardwise.spec.train import RestartSettings

# Seconds between two messages about waiting.
_REPORT_EVERY_S = 30.0
# Seconds between two looks at the run folder.
_POLL_S = 5.0
# Seconds that hosts whose ranks are done wait for the others.
_EXIT_S = 60.0
# Seconds in which waiting hosts learn that the run has ended.
_LINGER_S = 3.0
# Longest wait of torch's agents for each other, once all of them have connected to the store.
_AGENTS_S = 60.0


class HostRendezvous(RendezvousHandler):
    """One host of several, for a launcher whose supervisor decides when its ranks restart.

    `sizes` are the numbers of hosts on which the run can train. They meet at `server`, by default
    the address in the variable that torchrun reads; `address` is that of this host. `is_done`
    returns whether the run folder says that the run is done.
    """

    # Prefix of a setting's name in messages.
    SETTINGS: ClassVar[str] = "train.restart."

    def __init__(
        self,
        run_id: str,
        processes: int | None,
        sizes: tuple[int, ...],
        settings: RestartSettings,
        secret: Secret | None = None,
        is_done: Callable[[], bool] = lambda: False,
        server: tuple[str, int] | None = None,
        address: str | None = None,
    ) -> None:
        self._run_id, self._settings, self._is_done = run_id, settings, is_done
        self._endpoint = server or endpoint()
        shared = secret_for(self._endpoint, secret)
        self._served = serve_if_local(self._endpoint, shared, settings.lost_after_s)
        self.address = address or own_address(self._endpoint, settings.join_s)
        self.name = f"{socket.gethostname()} ({self.address})"
        post = Post(
            host=uuid.uuid4().hex[:12],
            name=self.name,
            address=self.address,
            processes=processes,
            sizes=sizes,
            last_call_s=settings.last_call_s,
        )
        self._client = RendezvousClient(self._endpoint, shared, run_id, post, settings.lost_after_s)
        # The store of the current round, if this host is its first.
        self._store: TCPStore | None = None
        self._server = ""
        self.blamed: Fault | None = None

    # ---- called by torch's agent ----------------------------------------------------------------

    def get_backend(self) -> str:
        return "shardwise"

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing to do: `leave` tells the other hosts."""

    def num_nodes_waiting(self) -> int:
        """Always 0: the supervisor lets waiting hosts join, at a checkpoint."""
        return 0

    def shutdown(self) -> bool:
        self._client.close()
        if self._served is not None:
            self._served.close_after_clients(_LINGER_S)
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a round that this host is part of; return its store and this host's place in it.

        Raises the exceptions of torch's rendezvous if the run has ended or the wait is too long.
        """
        self._store = None
        self._client.update(state=WAITING, port=0)
        began, said_at = time.monotonic(), time.monotonic() - _REPORT_EVERY_S + 5
        looked_at = 0.0
        while True:
            contact = self._client.contact()
            view, now = contact.view, time.monotonic()
            if view is not None:
                self._check_open(view)
                if view.round != self._client.post.round and view.place >= 0:
                    if (info := self._accept(view)) is not None:
                        return info
                    continue
                if view.ready and view.training:
                    began = now  # a spare waits as long as the others train
                elif now - looked_at > _POLL_S:
                    looked_at = now
                    self._check_unfinished()
            if now - began > self._settings.join_s:
                raise RendezvousTimeoutError(
                    f"{self._reason(contact)}; gave up after {now - began:.0f} s "
                    f"({self.SETTINGS}join_s)"
                )
            if now - said_at > _REPORT_EVERY_S:
                said_at = now
                say(self._reason(contact))
            time.sleep(0.05)

    # ---- called by the supervisor ---------------------------------------------------------------

    def report_progress(self, step: int, section: str, waits: bool) -> None:
        self._client.report_progress(step, section, waits)

    def report_failure(self, cause: str, lost_peer: bool) -> None:
        """Tell the others that this host's ranks failed and that it waits for a new round."""
        self._client.update(state=WAITING, failure=cause, lost_peer=lost_peer)

    def faults(self) -> tuple[Fault, ...]:
        """Hosts of this round that no longer train, as far as the server knows; empty if none."""
        view = self._client.contact().view
        if view is None:
            return ()
        if view.round != self._client.post.round:
            return (Fault(self.name, "the other hosts went on without it", True),)
        return view.faults

    def can_grow(self) -> bool:
        """Whether hosts wait that would make the run larger."""
        view = self._client.contact().view
        return view is not None and view.can_grow

    def behind(self) -> str | None:
        """The host that this one waits for, with its step.

        Empty if all hosts wait; None if the server does not answer.
        """
        view = self._client.contact().view
        return None if view is None else view.behind

    def can_leave(self) -> bool:
        """Whether the other hosts of this round can continue without this one."""
        view, sizes = self._client.contact().view, self._client.post.sizes
        return view is not None and largest_size(sizes, view.size - 1) > 0

    def leave(self, state: State, failure: str = "") -> None:
        """Tell the others that this host has left, or that the run is done or has failed.

        If it is done, wait for the hosts that still train, at most _EXIT_S seconds.
        """
        self._client.update(state=state, failure=failure)
        deadline = time.monotonic() + (_EXIT_S if state == DONE else 0)
        while time.monotonic() < deadline:
            contact = self._client.contact()
            if contact.view is not None and not contact.view.training:
                return
            if contact.unreachable_s > self._settings.lost_after_s:
                return
            time.sleep(0.05)

    # ---- rounds ---------------------------------------------------------------------------------

    def _check_open(self, view: View) -> None:
        """Raise if the run has ended; set `blamed`, the host that ended the last round."""
        restarted = self._server not in ("", view.server)
        if restarted and self._client.post.lost_peer:
            host, port = self._endpoint
            cause = f"its rendezvous server at port {port} was restarted"
            self.blamed = Fault(host, cause, True)
        else:
            self.blamed = view.blamed
        if view.failure:
            raise RendezvousClosedError(view.failure)
        if view.ended:
            raise RendezvousGracefulExitError("the run has ended on the other hosts")

    def _check_unfinished(self) -> None:
        """Raise RendezvousGracefulExitError if the run folder says that the run is done.

        A host that comes after the end meets no others, so only the folder tells.
        """
        if self._is_done():
            say("the run is done")
            raise RendezvousGracefulExitError("the run is done")

    def _accept(self, view: View) -> RendezvousInfo | None:
        """Take part in a round and return its store; None if one of its hosts does not."""
        leads = view.place == 0
        self._store = new_store(bind_address((self.address, 0))[0]) if leads else None
        self._client.update(
            state=STARTING,
            round=view.round,
            place=view.place,
            size=view.size,
            port=self._store.port if self._store is not None else 0,
            step=0,
            failure="",
            lost_peer=False,
        )
        deadline = time.monotonic() + 2 * self._settings.lost_after_s
        while time.monotonic() < deadline and self._is_complete(view.round):
            now = self._client.contact().view
            if now is not None and now.ready and now.meets_at[1]:
                if (store := self._shared_store(now, deadline)) is None:
                    break
                self._server = now.server
                self._client.update(state=TRAINING)
                at = RendezvousStoreInfo(*now.meets_at)
                return RendezvousInfo(store, view.place, view.size, at)
            time.sleep(0.02)
        self._client.update(state=WAITING, port=0)
        return None

    def _is_complete(self, number: int) -> bool:
        """Whether all hosts of round `number` take part, as far as the server knows."""
        view = self._client.contact().view
        return view is None or (view.round == number and not view.faults)

    def _shared_store(self, view: View, deadline: float) -> PrefixStore | None:
        """The round's store for torch's agents, once all hosts are connected; None if one fails to.

        An agent waits in the store for others without checking on them, so none may begin before
        all have connected.
        """
        try:
            tcp = self._store or TCPStore(
                *view.meets_at,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=self._settings.lost_after_s),
            )
            tcp.set_timeout(timedelta(seconds=_AGENTS_S))
            # Ranks use the same store, without this prefix.
            store = PrefixStore("agents", tcp)
            if store.add("connected", 1) == view.size:
                store.set("complete", "")
            while time.monotonic() < deadline and self._is_complete(view.round):
                if store.check(["complete"]):
                    return store
                # With many hosts, each asks less often.
                time.sleep(max(0.02, view.size / 20_000))
        except DistError as error:
            say(f"cannot reach the store of the ranks at {view.meets_at[0]}: {error}")
        return None

    def _reason(self, contact: Contact) -> str:
        """A sentence that says what this host waits for."""
        host, port = self._endpoint
        if contact.view is None:
            return (
                f"the rendezvous server at {host}:{port} has not answered for "
                f"{contact.unreachable_s:.0f} s ({contact.problem or 'no connection'})"
            )
        here = [self.name, *contact.view.waiting_names]
        sizes = self._client.post.sizes
        if contact.view.ready and contact.view.training:
            return f"this host is a spare: {contact.view.size} hosts train"
        needed = f"{min(sizes)} to {max(sizes)}" if len(sizes) > 1 else str(sizes[0])
        count = contact.view.waiting + 1
        return f"waiting for hosts: {count} of {needed} here ({', '.join(here[:8])})"
