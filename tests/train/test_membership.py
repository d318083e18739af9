"""Which hosts train together, decided from what they post, on a clock of the test."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.launch.membership import (
    DONE,
    FAILED,
    LEFT,
    STARTING,
    TRAINING,
    WAITING,
    Membership,
    Post,
    State,
    View,
)

LAST_CALL_S = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Hosts:
    """Hosts that post to one membership; rounds are accepted as a launcher does it."""

    def __init__(self, *sizes: int) -> None:
        self.clock, self.sizes = Clock(), sizes
        self.membership = Membership("server", self.clock)
        self.posts: dict[str, Post] = {}
        self.clock.now += 5  # longer than hosts take to reconnect

    def post(self, host: str, **fields: Any) -> None:
        known = self.posts.get(host, Post(host, host, host, 1, self.sizes, LAST_CALL_S))
        self.posts[host] = known._replace(**fields)
        for _ in range(2):  # launchers post again and again
            self.views = {name: self.membership.post(one) for name, one in self.posts.items()}

    def lose(self, host: str, sure: bool = True) -> None:
        del self.posts[host]
        self.membership.lose(host, "gone", sure)

    def meet(self, *hosts: str) -> tuple[str, ...]:
        """Let these hosts wait; those of the new round train in it."""
        for host in hosts:
            self.post(host, state=WAITING)
        places = {host: view for host, view in self.views.items() if view.place >= 0}
        members = sorted(places, key=lambda host: places[host].place)
        for state in (STARTING, TRAINING):
            for host in members:
                self.accept(host, places[host], state=state, failure="")
        return tuple(members)

    def accept(self, host: str, view: View, **fields: Any) -> None:
        self.post(host, round=view.round, place=view.place, size=view.size, **fields)


def test_a_round_begins_when_all_hosts_are_there() -> None:
    hosts = Hosts(2)
    hosts.post("a")
    assert hosts.views["a"].place == -1
    assert hosts.meet("a", "b") == ("a", "b")
    assert hosts.views["b"].round == 1
    assert hosts.views["b"].ready


def test_a_round_is_ready_once_every_host_has_accepted_it() -> None:
    hosts = Hosts(2)
    hosts.post("a")
    hosts.post("b")
    views = hosts.views
    hosts.accept("a", views["a"], state=STARTING, port=7)
    assert not hosts.views["a"].ready
    assert hosts.views["b"].meets_at == ("a", 7)
    hosts.accept("b", views["b"], state=STARTING)
    assert hosts.views["a"].ready


def test_fewer_hosts_wait_for_a_last_call() -> None:
    hosts = Hosts(1, 2)
    hosts.post("a")
    assert hosts.views["a"].place == -1
    hosts.clock.now += LAST_CALL_S
    assert hosts.meet("a") == ("a",)


def test_sizes_that_the_run_cannot_use_leave_a_spare() -> None:
    hosts = Hosts(1, 2, 4)
    hosts.clock.now += LAST_CALL_S
    for host in "abc":
        hosts.post(host)
    hosts.clock.now += LAST_CALL_S
    assert hosts.meet("a", "b", "c") == ("a", "b")
    assert hosts.views["a"].waiting_names == ("c",)
    assert not hosts.views["a"].can_grow
    hosts.post("d")
    assert hosts.views["a"].can_grow


def test_a_lost_host_is_blamed_and_the_others_go_on() -> None:
    hosts = Hosts(1, 2)
    assert hosts.meet("a", "b") == ("a", "b")
    hosts.lose("b")
    hosts.post("a", state=WAITING, failure="rank 0 lost its connection", lost_peer=True)
    assert [fault.name for fault in hosts.views["a"].faults] == ["b"]
    hosts.clock.now += LAST_CALL_S
    assert hosts.meet("a") == ("a",)
    blamed = hosts.views["a"].blamed
    assert blamed is not None
    assert blamed.name == "b"


def test_a_host_that_was_cut_off_is_blamed_after_it_is_back() -> None:
    hosts = Hosts(2)
    hosts.meet("a", "b")
    back = hosts.posts["b"]._replace(state=WAITING, failure="lost its connection", lost_peer=True)
    hosts.lose("b", sure=False)
    hosts.post("a", state=WAITING, failure="lost its connection", lost_peer=True)
    hosts.posts["b"] = back
    hosts.post("b")
    blamed = hosts.views["a"].blamed
    assert blamed is not None
    assert (blamed.name, blamed.cause) == ("b", "gone")


def test_the_host_whose_rank_failed_by_itself_is_blamed() -> None:
    hosts = Hosts(2)
    hosts.meet("a", "b")
    hosts.post("a", state=WAITING, failure="rank 0 lost its connection", lost_peer=True)
    hosts.post("b", state=WAITING, failure="rank 1 was killed by signal 9")
    blamed = hosts.views["a"].blamed
    assert blamed is not None
    assert (blamed.name, blamed.cause) == ("b", "rank 1 was killed by signal 9")


def test_no_round_begins_while_a_host_of_the_last_one_trains() -> None:
    hosts = Hosts(1, 2)
    hosts.meet("a", "b")
    hosts.post("b", state=WAITING, failure="rank 1 failed")
    hosts.clock.now += 10 * LAST_CALL_S
    hosts.post("b")
    assert hosts.views["b"].round == 1
    assert [fault.sure for fault in hosts.views["a"].faults] == [True]


def test_a_host_that_only_lost_the_server_is_no_fault() -> None:
    hosts = Hosts(2)
    hosts.meet("a", "b")
    back = hosts.posts["b"]
    hosts.lose("b", sure=False)
    hosts.post("a")
    assert [fault.sure for fault in hosts.views["a"].faults] == [False]
    hosts.posts["b"] = back
    hosts.post("b", step=9)
    assert hosts.views["a"].faults == ()


def test_a_restarted_server_learns_the_round_from_the_hosts() -> None:
    hosts = Hosts(1, 2)
    hosts.meet("a", "b")
    hosts.membership = Membership("another server", hosts.clock)
    # A newcomer that asks first must not begin a round of its own.
    newcomer = Post("c", "c", "c", 1, (1, 2), 0.0)
    assert hosts.membership.post(newcomer).place == -1
    hosts.clock.now += 2
    hosts.post("a")
    hosts.post("b")
    hosts.clock.now += 60
    hosts.post("a")
    view = hosts.membership.post(newcomer)
    assert (view.round, view.size, view.place) == (1, 2, -1)
    assert view.training == 2


def test_a_restarted_server_gives_no_number_of_a_round_twice() -> None:
    """Spares that it knows first begin a round; those who trained before learn of it."""
    hosts = Hosts(2)
    hosts.meet("a", "b")
    before = dict(hosts.posts)
    hosts.posts, hosts.membership = {}, Membership("another server", hosts.clock, first_round=7)
    hosts.clock.now += 5
    assert hosts.meet("c", "d") == ("c", "d")
    assert hosts.views["c"].round == 7
    assert hosts.membership.post(before["a"]).round == 7
    assert not hosts.membership.post(before["a"]).ended
    assert hosts.membership.post(before["a"]).place == -1


def test_posts_of_many_hosts_are_rarer() -> None:
    hosts = Hosts(4000)
    views = [
        hosts.membership.post(Post(f"{n}", f"{n}", "", 1, (4000,), LAST_CALL_S))
        for n in range(3000)
    ]
    assert views[0].post_after_s < 0.01
    assert views[-1].post_after_s == 1.5
    assert len(views[-1].waiting_names) < 10


def test_hosts_with_other_numbers_of_processes_are_refused() -> None:
    hosts = Hosts(1, 2)
    hosts.meet("a", "b")
    view = hosts.membership.post(hosts.posts["a"]._replace(host="c", processes=2))
    assert "--nproc" in view.failure
    assert not hosts.views["a"].ended


def test_torchrun_does_not_join_launchers_of_the_command() -> None:
    hosts = Hosts(1, 2)
    hosts.meet("a", "b")
    view = hosts.membership.post(hosts.posts["a"]._replace(host="c", processes=None))
    assert "use the same command on all hosts" in view.failure


def test_a_host_fails_when_its_first_rank_does_not_when_it_waits() -> None:
    """Under torchrun: its ranks have failed, the launcher has not stopped the others yet."""
    hosts = Hosts(2)
    hosts.meet("a", "b")
    hosts.post("b", failure="a rank was killed by signal 9")
    assert [fault.sure for fault in hosts.views["a"].faults] == [True]
    hosts.post("a", failure="a rank failed with exit code 1")
    hosts.clock.now += LAST_CALL_S
    hosts.post("a", state=WAITING)
    assert hosts.views["a"].round == 1  # b has not stopped its ranks yet
    assert hosts.meet("b") == ("a", "b")
    blamed = hosts.views["a"].blamed
    assert blamed is not None
    assert blamed.name == "b"


def test_all_hosts_restart_at_the_same_time_to_let_others_join() -> None:
    hosts = Hosts(2, 3)
    hosts.post("a")
    hosts.post("b")
    hosts.clock.now += LAST_CALL_S
    assert hosts.meet("a", "b") == ("a", "b")
    hosts.post("c", state=WAITING)
    assert hosts.views["a"].can_grow
    announced = hosts.views["a"].grow_after_s
    # A host that trains posts each second: each of them learns of it in time.
    assert announced > 1
    hosts.clock.now += 1
    hosts.post("c")
    assert hosts.views["b"].grow_after_s == pytest.approx(announced - 1)
    hosts.lose("c")
    hosts.post("a")
    assert not hosts.views["a"].can_grow
    hosts.clock.now += 60
    hosts.post("d", state=WAITING)
    assert hosts.views["a"].grow_after_s == pytest.approx(announced)


@pytest.mark.parametrize(("state", "failure"), [(DONE, ""), (FAILED, "a: out of attempts")])
def test_a_spare_is_told_how_the_run_ended(state: State, failure: str) -> None:
    hosts = Hosts(1)
    hosts.meet("a")
    hosts.post("b")
    assert not hosts.views["b"].ended
    hosts.post("a", state=state, failure="out of attempts")
    assert hosts.views["b"].ended
    assert hosts.views["b"].failure.removeprefix("host ") == failure


def test_the_host_that_others_wait_for_is_named() -> None:
    hosts = Hosts(3)
    hosts.meet("a", "b", "c")
    hosts.post("a", step=8, waits=True)
    hosts.post("b", step=8, waits=True)
    hosts.post("c", step=7, waits=False)
    assert hosts.views["a"].behind == "c in step 7"
    hosts.post("c", step=7, waits=True)
    assert hosts.views["a"].behind == ""


def test_a_host_that_gave_up_is_blamed_and_the_others_continue() -> None:
    hosts = Hosts(1, 2)
    hosts.meet("a", "b")
    hosts.post("b", state=LEFT, failure="rank 1 failed with exit code 2")
    assert [fault.name for fault in hosts.views["a"].faults] == ["b"]
    hosts.clock.now += 60
    assert hosts.meet("a") == ("a",)
    blamed = hosts.views["a"].blamed
    assert blamed is not None
    assert blamed.cause == "rank 1 failed with exit code 2"
    assert not hosts.views["a"].ended
