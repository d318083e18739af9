"""The table of an acceptance, the arithmetic behind its verdicts, and devices by torch's names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from shardwise.predict.api import estimate_run
from shardwise.report.accept import TITLES, print_result
from shardwise.spec.catalogue import find_device
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.recognise import recognise
from shardwise.step.profile import CollectiveProfile, StepProfile, TimeProfile
from shardwise.trials.accept import workload
from shardwise.trials.accept.bench import Bench, TrainedRun
from shardwise.trials.accept.checks import CHECKS, CompletedCheck, run_check
from shardwise.trials.accept.collectives import counted_as_predicted
from shardwise.trials.accept.line import CheckFailedError, Line, judge, not_run
from shardwise.trials.accept.machine import Machine
from shardwise.trials.accept.memory import check_memory
from shardwise.trials.accept.overhead import AGAIN, BARE, OURS, slowdown
from shardwise.trials.accept.parity import CASES, Case
from shardwise.trials.accept.result import Result, with_missing_checks, write_result
from shardwise.trials.accept.step_time import check_step_time
from tests.screens import assert_screen

CPUS = Machine(2, "CPU", "gloo", 2**33, True, find_device("CPU"))
GPUS = Machine(2, "NVIDIA H100 80GB HBM3", "nccl", 80 * 2**30, False, find_device("H100-SXM"))
GIB = 2**30
LONG = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda"


def bench_on(machine: Machine, folder: Path) -> Bench:
    return Bench(machine, folder, lambda what: None)


# ---- the table -----------------------------------------------------------------------------------


def test_the_table_shows_every_line_and_each_reason_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    needs = "needs a multiple of 4 devices"
    lines = [
        judge("ddp", "≤ 1e-10", "2e-15", True, difference=2e-15),
        judge("zero3", "≤ 1e-10", "4e-03", False, "trains something else than one device"),
        not_run("zero3, groups of 2", "≤ 1e-10", needs),
        not_run("ddp, tensor 2", "≤ 1e-10", needs),
    ]
    memory = [
        judge("zero3, allocated", "61.2 MiB ± 3%", "61.0 MiB (+0.3%)", True),
        judge("what no column has room for", "one two three four five", LONG, True),
    ]
    checked = [CompletedCheck("parity", lines, 12.3), CompletedCheck("memory", memory, 4.0)]
    result = Result(CPUS, checked, {}, None, 75.2)
    print_result(result, Path("accept.json"))
    printed = capsys.readouterr().out
    assert_screen("accept", printed)
    assert set(LONG.split()) <= set(printed.split())
    assert (result.count("ok"), result.failed, result.count("not run")) == (3, 1, 2)
    write_result(tmp_path / "accept.json", result)
    written = json.loads((tmp_path / "accept.json").read_text())
    assert not written["passed"]
    assert written["machine"]["catalogue"] == "CPU"
    [parity, _] = written["checks"]
    assert parity["lines"][0]["figures"] == {"difference": 2e-15}
    assert [line.get("reason") for line in parity["lines"][2:]] == [needs, needs]


def test_what_was_stopped_is_not_accepted() -> None:
    seen = [
        CompletedCheck("parity", [judge("ddp", "", "", True)], 1.0),
        CompletedCheck("memory", [], 0.1),
    ]
    checked = with_missing_checks(seen, ["parity", "memory", "time"], "stopped by SIGINT")
    assert [[line.verdict for line in one.lines] for one in checked] == [
        ["ok"],
        ["not run"],
        ["not run"],
    ]
    result = Result(CPUS, checked, {}, None, 1.0, stopped_by="SIGINT")
    assert not result.to_dict()["passed"]


def test_a_machine_that_shows_nothing_is_not_accepted() -> None:
    nothing = [CompletedCheck("overhead", [not_run("it", "", "busy")], 1.0)]
    assert not Result(CPUS, nothing, {}, None, 1.0).passed
    something = [*nothing, CompletedCheck("parity", [judge("ddp", "", "", True)], 1.0)]
    assert Result(CPUS, something, {}, None, 1.0).passed


def test_every_check_has_a_title() -> None:
    assert list(TITLES) == list(CHECKS)


@pytest.mark.parametrize("error", [CheckFailedError("it broke"), ZeroDivisionError("it broke")])
def test_a_check_that_raises_is_a_failed_line(error: Exception, tmp_path: Path) -> None:
    def check(_: Bench) -> Iterator[Line]:
        yield judge("first", "", "", True)
        raise error

    lines = list(run_check("it", check, bench_on(CPUS, tmp_path), 1.0))
    assert [line.verdict for line in lines] == ["ok", "failed"]
    assert "it broke" in lines[1].reason


# ---- verdicts ------------------------------------------------------------------------------------


def trained(
    machine: Machine, *, peak: float = 1.0, reserved: float = 1.0, step: float = 1.0
) -> TrainedRun:
    """A run measured as predicted, but for these factors."""
    assert machine.known is not None
    cluster = ClusterSpec(device=machine.known, devices_per_node=machine.processes)
    run = workload.describe(cluster, {"kind": "zero3"}).resolved()
    predicted = estimate_run(run)
    memory = predicted.known_memory
    high = memory.peak_reserved_bytes[1] if memory.peak_reserved_bytes else 0
    seen = memory._replace(
        peak_allocated_bytes=round(memory.peak_allocated_bytes / peak),
        peak_reserved_bytes=(round(high * reserved), round(high * reserved)),
    )
    time = predicted.time
    taken = TimeProfile(time.step_s * step) if time is not None else TimeProfile(0.1)
    return TrainedRun(run, predicted, predicted._replace(memory=seen, time=taken), 2.0, 0.0)


class Known(Bench):
    """A bench whose runs are known."""

    def __init__(self, machine: Machine, folder: Path, run: TrainedRun) -> None:
        super().__init__(machine, folder, lambda what: None)
        self._run = run

    def trained(self, name: str, settings: workload.Settings) -> TrainedRun:
        return self._run

    def calibrated(self) -> ClusterSpec:
        return self._run.run.cluster

    def busy_share(self) -> float:
        return self._run.busy


def found(machine: Machine, folder: Path, **factors: float) -> dict[str, str]:
    lines = check_memory(Known(machine, folder, trained(machine, **factors)))
    return {line.what: line.verdict for line in lines if line.what.startswith(("zero3", "reserv"))}


def test_memory_is_judged_by_allocated_and_reserved_bytes(tmp_path: Path) -> None:
    assert found(GPUS, tmp_path) == {"zero3, allocated": "ok", "zero3, reserved": "ok"}
    assert found(GPUS, tmp_path, peak=1.2)["zero3, allocated"] == "failed"
    assert found(GPUS, tmp_path, reserved=1.2)["zero3, reserved"] == "failed"
    assert found(CPUS, tmp_path, peak=1.02) == {"zero3, allocated": "ok", "reserved": "not run"}
    assert found(CPUS, tmp_path, peak=1.04)["zero3, allocated"] == "failed"


def times(machine: Machine, folder: Path, step: float, busy: float = 0.0) -> dict[str, str]:
    run = trained(machine, step=step)._replace(busy=busy)
    lines = islice(check_step_time(Known(machine, folder, run)), 2)
    return {line.what: line.verdict for line in lines}


def test_time_is_judged_by_the_predicted_interval_on_a_quiet_machine(tmp_path: Path) -> None:
    good = {"before calibrate": "ok", "after calibrate": "ok"}
    assert times(GPUS, tmp_path, step=1.1) == good
    assert times(GPUS, tmp_path, step=3.0) == dict.fromkeys(good, "failed")
    assert times(GPUS, tmp_path, step=3.0, busy=0.5) == dict.fromkeys(good, "not run")


def with_calls(profile: StepProfile, calls: int) -> StepProfile:
    return profile._replace(traffic=(CollectiveProfile("all_gather", "shard", 2, calls, 100),))


def test_a_call_more_than_predicted_fails_and_is_named() -> None:
    profile = trained(CPUS).predicted
    assert counted_as_predicted("it", with_calls(profile, 9), with_calls(profile, 9)).verdict == (
        "ok"
    )
    line = counted_as_predicted("it", with_calls(profile, 9), with_calls(profile, 10))
    assert line.verdict == "failed"
    assert "10 calls" in line.reason


def test_the_slowdown_is_that_within_rounds() -> None:
    """The machine becomes twice as slow in the second round, which is no overhead."""
    seconds = {BARE: [1.0, 2.0, 1.0], AGAIN: [1.0, 2.0, 1.0], OURS: [1.1, 2.2, 1.1]}
    measured = slowdown(seconds)
    assert measured.median == pytest.approx(0.1)
    assert measured.noise == 0
    assert slowdown({**seconds, AGAIN: [1.1, 2.2, 1.1]}).noise == pytest.approx(0.0953, abs=1e-4)


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 6, 8])
def test_layouts_suit_the_number_of_devices(processes: int) -> None:
    """Each can be resolved, and four devices leave none out."""
    cluster = ClusterSpec(device=find_device("H100-SXM"), devices_per_node=processes)
    for settings in workload.layouts(processes).values():
        assert workload.describe(cluster, settings).resolved().strategy.devices == processes
    assert ("hybrid" in workload.layouts(processes)) == (processes in (4, 6, 8))
    assert all(isinstance(one, Case) for one in CASES)


# ---- devices -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reported", "memory", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "H100-SXM"),
        ("NVIDIA H100 PCIe", 79.1, "H100-PCIe"),
        ("NVIDIA H200", 139.8, "H200-SXM"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", 79.1, "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", 79.1, "A100-PCIe-80GB"),
        ("Tesla V100-SXM2-16GB", 15.8, "V100-SXM2-16GB"),
        ("NVIDIA GeForce RTX 4090", 23.6, "RTX-4090"),
        ("NVIDIA A10G", 22.1, "A10G"),
        ("NVIDIA L4", 22.0, "L4"),
        ("NVIDIA L40S", 44.4, "L40S"),
        ("Tesla T4", 14.6, "T4"),
        ("Tesla P100-PCIE-16GB", 15.9, "P100-PCIe-16GB"),
        ("NVIDIA A40", 44.4, "A40"),
        ("NVIDIA A100-PCIE-40GB", 39.4, None),
        ("NVIDIA GH200 480GB", 94.5, "GH200"),
        ("NVIDIA B300 SXM6 AC", 267.7, "B300"),
        ("NVIDIA GB300", 276.5, "GB300"),
        ("NVIDIA RTX 6000 Ada Generation", 47.4, "RTX-6000-Ada"),
        ("NVIDIA RTX A6000", 47.5, "RTX-A6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 95.0, "RTX-PRO-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 95.0, "RTX-PRO-6000-Server"),
        ("NVIDIA GeForce RTX 3060", 11.7, "RTX-3060-12GB"),
        ("NVIDIA GeForce RTX 3060", 7.7, None),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 15.6, "RTX-4070-Ti-SUPER"),
        ("NVIDIA GeForce RTX 4070 Ti", 11.7, None),
        ("NVIDIA GeForce GTX 1080", 8.0, None),
        ("NVIDIA H100 80GB HBM3", 40.0, None),
        ("", 8.0, None),
    ],
)
def test_devices_are_recognised(reported: str, memory: float, name: str | None) -> None:
    device = recognise(reported, round(memory * GIB))
    assert (device.name if device is not None else None) == name
