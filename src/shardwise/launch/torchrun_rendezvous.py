"""The rendezvous under torchrun, which runs any script and has no supervisor.

Torch's agent tells a rendezvous little: it asks whether to restart the ranks (`num_nodes_waiting`)
and for a new round (`next_rendezvous`), also after a rank has failed. So each host notes by itself
when its first rank fails, and the server sees on which host that was first.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousParameters,
)

from shardwise.launch.host_rendezvous import HostRendezvous
from shardwise.launch.membership import DONE, FAILED, LEFT, TRAINING, largest_size
from shardwise.launch.rendezvous_address import DEFAULT_ENDPOINT, own_address, parse_endpoint
from shardwise.launch.say import say
from shardwise.launch.shared_secret import secret_for, take_secret
from shardwise.pytorch.channel import Secret
from shardwise.pytorch.device import connect_from
from shardwise.spec.record import SpecError
from shardwise.spec.suggest import did_you_mean
from shardwise.spec.train import RestartSettings

# What `--rdzv-conf` may set, as in `[train.restart]`.
_SETTINGS = ("lost_after_s", "join_s", "last_call_s")
# Torch adds this setting for every backend, also if the user did not.
_TORCH_KEY = "timeout"
# Longest wait for the state of the others once the ranks of this host have failed for good.
_LEAVE_S = 2.0
# Seconds between two looks at ranks that have ended, until torch has seen it too.
_POLL_S = 0.05


def rendezvous_from(parameters: RendezvousParameters) -> TorchrunRendezvous:
    """The rendezvous that the options of torchrun describe.

    Takes the secret out of the environment: ranks do not inherit it.

    Raises:
        SpecError: An option is invalid, or the hosts have no secret.
    """
    settings = _read_settings(parameters)
    server = parse_endpoint(parameters.endpoint or DEFAULT_ENDPOINT)
    secret = secret_for(server, take_secret(os.environ))
    address = parameters.local_addr or own_address(server, settings.join_s, "--rdzv-endpoint")
    connect_from(address)
    sizes = tuple(range(parameters.min_nodes, parameters.max_nodes + 1))
    return TorchrunRendezvous(parameters.run_id, sizes, settings, secret, server, address)


def _read_settings(parameters: RendezvousParameters) -> RestartSettings:
    """The settings of --rdzv-conf; raises SpecError for unknown keys."""
    given = {name: value for name, value in parameters.config.items() if name != _TORCH_KEY}
    for name in given.keys() - set(_SETTINGS):
        hint = did_you_mean(name, _SETTINGS) or f"; known keys are {', '.join(_SETTINGS)}"
        raise SpecError(f"--rdzv-conf.{name}: unknown key{hint}")
    return RestartSettings.read(given, "--rdzv-conf")


class TorchrunRendezvous(HostRendezvous):
    """One host of several that torchrun has started."""

    SETTINGS = "--rdzv-conf "

    def __init__(
        self,
        run_id: str,
        sizes: tuple[int, ...],
        settings: RestartSettings,
        secret: Secret,
        server: tuple[str, int],
        address: str,
    ) -> None:
        super().__init__(run_id, None, sizes, settings, secret, server=server, address=address)
        # Whether num_nodes_waiting asked torch to restart the ranks: then they did not fail.
        self._restarts = False
        # Since when there is a fault in this round.
        self._fault_at: float | None = None
        if hasattr(os, "waitid"):  # not on macOS
            threading.Thread(target=self._watch_ranks, daemon=True, name="ranks").start()

    def num_nodes_waiting(self) -> int:
        """1 if the ranks must restart, since a host is lost or others can join; else 0."""
        reason = self._reason_to_restart()
        if reason is None:
            return 0
        say(f"{reason}. Restarting")
        self._restarts = True
        return 1

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a round; return its store and this host's place in it.

        If no restart was asked for, the ranks of this host have failed, and the others are told.
        """
        if self._client.post.state == TRAINING and not self._restarts:
            self._note_failure("its ranks failed")
        try:
            info = super().next_rendezvous()
        except RendezvousGracefulExitError as end:
            if self._client.post.failure:
                raise RendezvousClosedError(f"{end}, and this host has failed") from None
            say(str(end))
            raise SystemExit(0) from None  # torch would fail: it expects a result
        self._restarts, self._fault_at = False, None
        if self.blamed is not None:
            say(f"Blamed: host {self.blamed.name}: {self.blamed.cause}")
        return info

    def shutdown(self) -> bool:
        """Tell the others how this host ends, and leave."""
        if self._client.post.state == TRAINING:
            # Torch does not pass on the result: its agent raises an exception where ranks failed.
            if sys.exc_info()[1] is None:
                self.leave(DONE)
            else:
                self._give_up()
        return super().shutdown()

    def _reason_to_restart(self) -> str | None:
        """Why the ranks must restart, as a sentence; None if they need not."""
        faults = sorted(self.faults(), key=lambda fault: not fault.sure)
        now, contact = time.monotonic(), self._client.contact()
        if not faults:
            self._fault_at = None
        else:
            self._fault_at = self._fault_at or now
            # A host that only lost the server is soon back.
            if faults[0].sure or now - self._fault_at > self._settings.lost_after_s:
                return f"host {faults[0].name}: {faults[0].cause}"
        view = contact.view
        if view is not None and view.can_grow and contact.unreachable_s >= view.grow_after_s:
            return f"{view.waiting} waiting host{'s' * (view.waiting > 1)} can join"
        return None

    def _note_failure(self, cause: str) -> None:
        """Tell the others that ranks of this host failed, and whether another host failed first."""
        if not self._client.post.failure:
            self._client.update(failure=cause, lost_peer=bool(self.faults()))

    def _give_up(self) -> None:
        """Leave the run to the other hosts, or end it as failed if they are too few."""
        self._note_failure("its ranks failed")
        self._client.update(state=LEFT)
        deadline = time.monotonic() + _LEAVE_S
        while (view := self._client.contact().view) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        sizes = self._client.post.sizes
        if view is None or not largest_size(sizes, view.training + view.waiting):
            self._client.update(state=FAILED)

    def _watch_ranks(self) -> None:
        """Note when a rank fails, before those of other hosts fail because they have lost it."""
        while True:
            # No rank is started yet, or torch has already asked for its exit code.
            with suppress(ChildProcessError, ProcessLookupError):
                # Torch asks for the exit code later, so it must be kept.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
                # Torch gives each rank a session. Others may be orphans of ranks, in a container.
                is_rank = ended is not None and os.getsid(ended.si_pid) == ended.si_pid
                trains = self._client.post.state == TRAINING and not self._restarts
                if ended is not None and is_rank and trains and ended.si_status:
                    signalled = ended.si_code != os.CLD_EXITED
                    how = "was killed by signal" if signalled else "failed with exit code"
                    self._note_failure(f"a rank {how} {ended.si_status}")
            time.sleep(_POLL_S)
