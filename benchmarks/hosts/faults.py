"""Faults of hosts: what is done to a run, and what must come of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.hosts.cluster import STEP_S, Cluster, wait_until

# What launchers say when hosts come or go.
JOINED = "Hosts join or leave"


class Fault(NamedTuple):
    """A fault of host `victim`, which returns once the fault is over.

    `restarts`: whether ranks must be restarted. `elastic`: whether the run may have one host less.
    """

    name: str
    # What happens, in a table.
    what: str
    inject: Callable[[Cluster, int], None]
    restarts: bool = True
    elastic: bool = False
    # Whether the fault is one of the host with the rendezvous server.
    of_server: bool = False
    spare: bool = False
    # Whether the same number of hosts trains at all times.
    same_size: bool = True
    # Seconds of a forward pass: a run must not end before a host is back.
    step_s: float = STEP_S
    # Whether it lasts for minutes, or needs many steps after it.
    is_long: bool = False
    # Whether a host must join while the others train.
    joins: bool = False


def _kill_rank(run: Cluster, victim: int) -> None:
    run.ranks(victim)[-1].kill()


def _kill_host(run: Cluster, victim: int) -> None:
    run.kill(victim)
    time.sleep(5)
    run.start(victim)


def _power_loss(run: Cluster, victim: int) -> None:
    run.link(victim, up=False)
    run.kill(victim)
    time.sleep(20)
    run.link(victim, up=True)
    run.start(victim)


def _link_down(seconds: float) -> Callable[[Cluster, int], None]:
    def inject(run: Cluster, victim: int) -> None:
        run.link(victim, up=False)
        time.sleep(seconds)
        run.link(victim, up=True)

    return inject


def _slow_link(run: Cluster, victim: int) -> None:
    run.slow_link(victim, 1e6)
    time.sleep(30)
    run.slow_link(victim, None)


def _kill_server(run: Cluster, victim: int) -> None:
    run.kill_server()
    time.sleep(10)
    run.serve()


def _never_back(run: Cluster, victim: int) -> None:
    run.kill(victim)


def _cut_for_ever(run: Cluster, victim: int) -> None:
    run.link(victim, up=False)
    # A host that nobody reaches is switched off in the end.
    if wait_until(lambda: "Restarting" in run.said(victim)):
        run.kill(victim)


def _grow(run: Cluster, victim: int) -> None:
    """The host leaves, the others go on, and it comes back while they train."""
    before = run.step()
    run.kill(victim)
    run.wait_for_step(before + 2)
    run.start(victim)
    other = 0 if victim else 1
    wait_until(lambda: JOINED in run.said(other) or "the run is done" in run.said(victim))


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("rank-kill", "a rank is killed", _kill_rank),
        Fault("host-back", "all processes of a host are killed; it is back after 5 s", _kill_host),
        Fault(
            "power-loss",
            "a host loses its link and its processes; it is back after 20 s",
            _power_loss,
        ),
        Fault("link-5s", "a link is down for 5 s", _link_down(5), restarts=False),
        Fault("link-60s", "a link is down for 60 s", _link_down(60), is_long=True),
        Fault(
            "slow-link", "a link has 1 Mbit/s for 30 s", _slow_link, restarts=False, is_long=True
        ),
        Fault(
            "server-back",
            "the rendezvous server is killed; it is back after 10 s",
            _kill_server,
            restarts=False,
            of_server=True,
        ),
        Fault(
            "server-host-back",
            "a host that trains and serves the rendezvous is killed; it is back after 5 s",
            _kill_host,
            of_server=True,
        ),
        Fault("spare", "a host is killed; a spare host takes its place", _never_back, spare=True),
        Fault(
            "shrink",
            "a host is killed and does not return; the others continue",
            _never_back,
            elastic=True,
            same_size=False,
        ),
        Fault(
            "link-gone",
            "a link is down for ever; the others continue",
            _cut_for_ever,
            elastic=True,
            same_size=False,
        ),
        Fault(
            "grow",
            "a host is killed, the others continue, and it joins again",
            _grow,
            elastic=True,
            same_size=False,
            joins=True,
            step_s=0.2,
            is_long=True,
        ),
    )
}
