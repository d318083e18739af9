"""Kill one of three replica groups and let it return, several times.

`python -m benchmarks.replicas [--faults 10] [--json]` starts three groups of two processes with
`shardwise train`, kills all processes of one with SIGKILL, waits until the others made the next
step, and starts it again. Then plain FSDP2 repeats all steps with the batches of absent groups
dropped, and every rank's parameters and optimizer states are compared after every step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.replicas.groups import ROOT, Commit, Groups, free_port, replica_groups, wait_until
from benchmarks.replicas.reference import GROUPS, RANKS

# Steps that all groups make together between two faults.
TOGETHER = 5


class Fault(NamedTuple):
    """A group that was killed. Times are None where it did not happen.

    `next_step_s` is from the kill to the first step of the others without it, on the slowest rank;
    `return_s` from its new start, with all imports, to its first step.
    """

    group: int
    next_step_s: float | None
    return_s: float | None


def inject(groups: Groups, victim: int) -> Fault:
    """Kill a group, wait for the next step of the others, and let it return."""
    others = [group for group in range(GROUPS) if group != victim]
    killed_at = groups.kill(victim)
    went_on = wait_until(lambda: all(groups.present(group) == others for group in others))
    next_step_s = None
    if went_on:
        first = {group: groups.changes(group)[-1]["step"] for group in others}
        wait_until(lambda: len(_commits_of(groups, first)) == RANKS * len(others))
        next_step_s = max(one.at for one in _commits_of(groups, first)) - killed_at
    started, started_at = len(groups.changes(victim)), time.time()
    groups.start(victim)
    returned = wait_until(
        lambda: (
            len(groups.changes(victim)) > started
            and all(groups.present(group) == list(range(GROUPS)) for group in range(GROUPS))
        )
    )
    back = [one.at for one in groups.commits() if one.group == victim and one.at > started_at]
    return Fault(victim, next_step_s, back[0] - started_at if returned and back else None)


def _commits_of(groups: Groups, steps: dict[int, int]) -> list[Commit]:
    """The commits of these steps by these groups."""
    return [one for one in groups.commits() if steps.get(one.group) == one.step]


def together(groups: Groups) -> bool:
    """Whether all groups make some steps together."""
    first = max((one.step for one in groups.commits()), default=0)

    def reached() -> bool:
        steps: dict[int, int] = defaultdict(int)
        for one in groups.commits():
            steps[one.group] = max(steps[one.group], one.step)
        return len(steps) == GROUPS and min(steps.values()) >= first + TOGETHER

    return wait_until(reached)


def schedule_of(groups: Groups, last: int) -> list[list[int]]:
    """The groups that took part in each step, which all of them must agree on."""
    present: dict[int, list[int]] = {}
    committed = {(one.group, one.step) for one in groups.commits()}
    for group in range(GROUPS):
        changes = groups.changes(group)
        for change, following in zip(changes, [*changes[1:], None], strict=True):
            end = following["step"] if following is not None else last + 1
            for step in range(change["step"], end):
                if (group, step) in committed:
                    known = present.setdefault(step, change["present"])
                    assert known == change["present"], (step, group, known, change)
    assert sorted(present) == list(range(1, last + 1))
    return [present[step] for step in range(1, last + 1)]


def run_reference(folder: Path, schedule: list[list[int]]) -> dict[tuple[int, int], int]:
    """The digest of each step and rank of a group, from plain FSDP2."""
    (folder / "schedule.json").write_text(json.dumps(schedule))
    port, world = str(free_port()), GROUPS * RANKS
    command = [sys.executable, "-m", "benchmarks.replicas.reference", str(folder)]
    base = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}  # fmt: skip
    ranks = [
        subprocess.Popen(command, env={**base, "RANK": str(rank)}, cwd=folder)
        for rank in range(world)
    ]
    assert [process.wait() for process in ranks] == [0] * world
    found: dict[tuple[int, int], int] = {}
    for rank in range(world):
        for line in (folder / f"reference-{rank}.jsonl").read_text().splitlines():
            one = json.loads(line)
            key = (one["step"], rank % RANKS)
            assert found.setdefault(key, one["digest"]) == one["digest"], "the reference differs"
    return found


def run(folder: Path, faults: int) -> dict[str, Any]:
    with replica_groups(folder, GROUPS) as groups:
        for group in range(GROUPS):
            groups.start(group)
        assert together(groups), groups.said(0)
        done = []
        for number in range(faults):
            done.append(inject(groups, number % GROUPS))
            print(f"# fault {number + 1}: {done[-1]}", file=sys.stderr, flush=True)
            assert together(groups), groups.said(0)
        codes = groups.stop()
        commits = groups.commits()
        last = max(one.step for one in commits)
        schedule = schedule_of(groups, last)
    expected = run_reference(folder, schedule)
    equal = [one.digest == expected[one.step, one.rank] for one in commits]
    next_step = [one.next_step_s for one in done if one.next_step_s is not None]
    return_s = [one.return_s for one in done if one.return_s is not None]
    return {
        "faults": faults,
        "survived": len(next_step),
        "returned": len(return_s),
        "bit_equal": all(equal),
        "steps": last,
        "steps_with_an_absent_group": sum(len(present) < GROUPS for present in schedule),
        "states_compared": len(equal),
        "next_step_s": {"median": median(next_step), "max": max(next_step)},
        "return_s": {"median": median(return_s), "max": max(return_s)},
        "exit_codes": codes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = run(Path(folder), arguments.faults)
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:>28}  {value}")


if __name__ == "__main__":
    main()
