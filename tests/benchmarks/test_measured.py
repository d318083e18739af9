"""Contributed runs: what the checker refuses and why, the protocol, and what a refit changes."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.accuracy_catalogue import CATALOGUE
from benchmarks.measured import evidence, refit
from benchmarks.measured.errors import errors_of, features_of, lines
from benchmarks.measured.files import RUNS, Entry, check
from benchmarks.measured.protocol import (
    Judged,
    Protocol,
    digest,
    published_violations,
    read_protocol,
    violations,
)
from shardwise.predict import kernels
from shardwise.runs.contribution.collect import collect
from shardwise.runs.contribution.record import Contribution
from shardwise.spec import catalogue, tables
from shardwise.spec.lookup import find_cluster
from tests.command import ROOT, environment
from tests.contribution.folders import run_of, write_folder

DEVICE = "RTX-4090"
PROTOCOL = read_protocol()


def record(folder: Path, slowdown: float = 1.1, **fields: Any) -> dict[str, Any]:
    return collect(write_folder(folder, run_of(**fields), slowdown)).to_dict()


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return record(tmp_path_factory.mktemp("valid") / "run")


def checked(folder: Path, *records: Any) -> tuple[list[Entry], list[str]]:
    (folder / "us").mkdir(exist_ok=True)
    for number, one in enumerate(records):
        text = one if isinstance(one, str) else json.dumps(one)
        (folder / "us" / f"{number}.json").write_text(text)
    found = check(folder)
    return found.entries, found.problems


# ---- checker --------------------------------------------------------------------------------


def test_what_is_contributed_is_accepted_and_read_back(
    tmp_path: Path, valid: dict[str, Any]
) -> None:
    (entry,), problems = checked(tmp_path, valid)
    assert not problems
    assert entry.run.to_dict() == valid
    assert (entry.source, entry.run.hardware.label) == ("us", DEVICE)


def test_contributions_of_this_project_are_valid() -> None:
    found = check(RUNS)
    assert found.problems == []
    assert found.entries
    assert violations(PROTOCOL, found.entries) == []


def put(record: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with one value changed."""
    copied: dict[str, Any] = json.loads(json.dumps(record))
    part = copied
    *inner, last = path.split(".")
    for key in inner:
        part = part[key]
    part[last] = value(part[last]) if callable(value) else value
    return copied


def faster(one: dict[str, Any]) -> dict[str, Any]:
    """A step so short that the device would have to exceed its peak."""
    without = put(one, "measured.throughput", None)
    shorter = put(without, "measured.time.step_s_spread", None)
    return put(shorter, "measured.time.step_s", lambda step_s: step_s / 100)


def in_milliseconds(one: dict[str, Any]) -> dict[str, Any]:
    without = put(put(one, "measured.throughput", None), "measured.time.step_s_spread", None)
    return put(without, "measured.time.step_s", 5e4)


def fuller(one: dict[str, Any]) -> dict[str, Any]:
    """25 GiB on a device of 24 GiB."""
    grown = put(one, "measured.memory.terms", {"working": 25 << 30})
    return put(grown, "measured.memory.peak_allocated_bytes", 25 << 30)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (faster, "MFU of"),
        (fuller, "are more than the"),
        (lambda one: put(one, "schema", 2), "schema is 2"),
        (in_milliseconds, "is it seconds?"),
        (lambda one: put(one, "measured.time.step_s", "12ms"), "without a unit"),
        (lambda one: put(one, "measured.memory.peak_allocated_bytes", 7), "do not sum"),
        (lambda one: put(one, "measured.throughput.mfu", 0.99), "but step_s implies"),
        (lambda one: put(one, "measured.work.tokens", 10**9), "tokens"),
        (lambda one: put(one, "parameters", 3), "the shapes have"),
        (lambda one: put(one, "hardware.nodes", 3), "device"),
        (lambda one: put(one, "hardware.reported", False), "another name"),
        (lambda one: put(one, "hardware.device", "our-gpu"), "must be one of"),
        (lambda one: put(one, "host.versions.torch", "2.13 of ours"), "host.versions.torch"),
        (lambda one: {**one, "note": "from us"}, "note"),
        (lambda one: {**one, "kind": "profile"}, "not a contribution"),
        (lambda one: "{", "not valid JSON"),
        (lambda one: "[]", "not a contribution"),
    ],
)
def test_a_bad_file_is_refused_with_its_reason(
    tmp_path: Path, valid: dict[str, Any], spoil: Callable[[Any], Any], reason: str
) -> None:
    entries, problems = checked(tmp_path, spoil(valid))
    assert not entries
    assert problems
    assert all(problem.startswith("us/0.json: ") for problem in problems)
    assert any(reason in problem for problem in problems), problems


REAL = json.loads((RUNS / "shardwise-ci" / "cpu-zero3.json").read_text())


def times_of(one: dict[str, Any], factor: float) -> dict[str, Any]:
    """All measured times and rates in another unit, consistently."""
    for path in ("time.step_s", "throughput.tokens_per_s", "throughput.tokens_per_s_per_device"):
        power = 1 if path.startswith("time") else -1
        one = put(one, f"measured.{path}", lambda value, power=power: value * factor**power)
    return put(one, "measured.time.step_s_spread", lambda ends: [end * factor for end in ends])


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda one: put(one, "hardware.nodes", 10**13), "hardware.nodes"),
        (lambda one: put(one, "hardware.network_bytes_per_s", 1.0), "network"),
        (lambda one: put(one, "model.layers", 10**7), "model.layers"),
        (lambda one: put(one, "model.kv_heads", 3), "multiple of kv_heads"),
        (lambda one: put(put(one, "model.experts", 2), "model.experts_per_token", 5), "experts"),
        (lambda one: {**one, "adapter": {"dora": False, "base": "bf16", "trains_parts": False,
                                         "targets": []}}, "nothing is trained"),
        # Of two cores: 27 TFLOP/s each; 27 MFLOP/s each.
        (lambda one: times_of(one, 1e-3), "faster than the cores"),
        (lambda one: times_of(one, 1e3), "too slow"),
        (lambda one: times_of(one, 1e-6), "shorter than any step"),
        (lambda one: put(one, "measured.work.model_flops", lambda flops: 1000 * flops), "shapes"),
        (lambda one: put(one, "measured.work.hardware_flops", lambda flops: 9 * flops), "9 times"),
        (lambda one: put(put(one, "predicted.memory.terms", {"working": 10**18}),
                         "predicted.memory.peak_allocated_bytes", 10**18), "would not have run"),
        (lambda one: put(one, "steps", 10**13), "more than a year"),
        (lambda one: put(one, "steps", True), "steps: must be a number"),
        (lambda one: put(one, "job.seq_len", "128"), "job.seq_len: must be a number"),
        (lambda one: put(one, "schema", True), "schema is True"),
        (lambda one: put(one, "job.seq_len", 10**9), "positions of the model"),
        (lambda one: put(one, "measured.shardwise", "99.0"), "newest Shardwise"),
        (lambda one: json.dumps(one)[:-1] + ', "steps": "text", "steps": 5}', "comes twice"),
        (lambda one: "[" * 60_000, "nested too deeply"),
    ],
)  # fmt: skip
def test_a_hostile_file_is_refused_and_the_others_are_checked(
    tmp_path: Path, spoil: Callable[[Any], Any], reason: str
) -> None:
    (entry,), problems = checked(tmp_path, spoil(REAL), REAL)
    assert entry.path.name == "1.json"
    assert all(problem.startswith("us/0.json: ") for problem in problems)
    assert any(reason in problem for problem in problems), problems


def test_a_device_has_the_memory_and_peak_of_the_catalogue(
    tmp_path: Path, valid: dict[str, Any]
) -> None:
    larger = put(valid, "hardware.memory_bytes", 10**17)
    faster_device = put(valid, "hardware.peak_flops.bf16", 1e19)
    nearly = put(valid, "hardware.memory_bytes", lambda size: round(0.98 * size))
    (entry,), problems = checked(tmp_path, larger, faster_device, nearly)
    assert entry.path.name == "2.json"
    assert "us/0.json: hardware.memory_bytes" in problems[0]
    assert any("us/1.json: hardware.peak_flops" in problem for problem in problems)


def test_a_step_is_not_hundreds_of_times_the_predicted(tmp_path: Path) -> None:
    """A prediction of 50 ms, and 50 s measured: milliseconds for seconds."""
    slow = put(times_of(REAL, 50 / 0.8866), "predicted.time", {"step_s": 0.05})
    _, (problem,) = checked(tmp_path, slow)
    assert "too far from the predicted" in problem


def test_a_copy_with_other_last_digits_is_a_duplicate(tmp_path: Path) -> None:
    copies = [times_of(REAL, 1 + 1e-9), put(REAL, "steps", 13), times_of(REAL, 1.001)]
    entries, problems = checked(tmp_path, REAL, *copies)
    assert [entry.path.name for entry in entries] == ["0.json", "3.json"]
    assert [problem.partition(" of ")[0] for problem in problems] == [
        "us/1.json: is a duplicate", "us/2.json: is a duplicate",
    ]  # fmt: skip


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.measured", "check", "--runs", str(tmp_path / "no")],
        capture_output=True, text=True, cwd=ROOT, env=environment(), check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "is not a folder" in done.stderr


def test_three_bad_files_have_one_reason_each(tmp_path: Path, valid: dict[str, Any]) -> None:
    _, problems = checked(tmp_path, faster(valid), fuller(valid), put(valid, "schema", 9), valid)
    assert [problem.partition(":")[0] for problem in problems] == [
        "us/0.json", "us/1.json", "us/2.json",
    ]  # fmt: skip


def test_a_duplicate_is_named(tmp_path: Path, valid: dict[str, Any]) -> None:
    """Other versions do not make another run; another measurement does."""
    again = put(valid, "host.versions", {"python": "3.12.1"})
    (first,), problems = checked(tmp_path, valid, again)
    assert first.path.name == "0.json"
    (problem,) = problems
    assert problem.startswith("us/1.json: is a duplicate of us/0.json")
    other = times_of(valid, 1.001)
    other["measured"]["throughput"].pop("mfu")
    other["measured"]["throughput"].pop("hfu")
    entries, problems = checked(tmp_path, valid, other)
    assert (len(entries), problems) == (2, [])


@pytest.mark.parametrize(
    "place", ["0.json", "Us/0.json", "us/deep/0.json", "us/0.txt", "us/a b.json"]
)
def test_a_file_elsewhere_is_refused(tmp_path: Path, valid: dict[str, Any], place: str) -> None:
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(valid))
    (problem,) = check(tmp_path).problems
    assert "runs/SOURCE/NAME.json" in problem


def test_the_command_exits_with_1_if_a_file_is_refused(
    tmp_path: Path, valid: dict[str, Any]
) -> None:
    checked(tmp_path, valid, faster(valid))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.measured", "check", "--runs", str(tmp_path)],
        capture_output=True, text=True, cwd=ROOT, env=environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "1 valid files of 1 sources" in done.stdout
    assert "refused: us/1.json" in done.stderr


# ---- report ---------------------------------------------------------------------------------


def entry(source: str, one: dict[str, Any]) -> Entry:
    return Entry(Path("0.json"), source, Contribution.of_file(one, source))


def test_errors_are_grouped_by_device_release_and_feature(
    tmp_path: Path, valid: dict[str, Any]
) -> None:
    """Steps of 1.1 and 1.3 times the predicted: tokens/s are predicted 10 % and 30 % too high."""
    slower = record(tmp_path / "slower", 1.3, recompute="full")
    newer = put(slower, "predicted.shardwise", "0.2.0")
    entries = [entry("a", valid), entry("a", slower), entry("b", newer)]
    found = {(line.by, line.name): line for line in lines(entries)}
    device = found["device", DEVICE]
    assert (device.runs, device.sources) == (3, 2)
    assert device.time is not None
    assert device.time["median_error"] == pytest.approx(0.3)
    assert device.memory is not None
    assert device.memory["max_error"] == 0.0
    assert found["release", "0.2.0"].runs == 1
    first = found["release", "0.1.0"].time
    assert first is not None
    assert first["median_error"] == pytest.approx(0.2)
    assert found["feature", "recompute"].runs == 2
    assert errors_of(entries[0].run).time == pytest.approx(0.1)
    assert features_of(entries[1].run) == ["single", "recompute"]


def test_evidence_is_of_held_out_sources_without_calibration(valid: dict[str, Any]) -> None:
    calibrated = put(valid, "hardware.calibrated", True)
    entries = [entry("a", valid), entry("b", calibrated), entry("c", valid)]
    fitted = _released("c", entries[2:])
    (found,) = evidence.contributed(entries, fitted)
    assert (found["device"], found["evidence"]) == (DEVICE, "contributed")
    assert (found["time"]["runs"], found["memory"]["runs"]) == (1, 2)
    assert found["time"]["median_error"] == pytest.approx(0.1)


def test_the_catalogue_says_what_the_benchmark_finds() -> None:
    found = evidence.evidence(check(RUNS).entries, PROTOCOL)
    assert evidence.text_of(found) == evidence.FILE.read_text(encoding="utf-8")
    assert catalogue.accuracy() == found


# ---- protocol -------------------------------------------------------------------------------


def _released(source: str, entries: list[Entry], judged_in: str = "0.0.9") -> Protocol:
    judged = Judged(
        source=source,
        judged_in=judged_in,
        runs=len(entries),
        median_error=0.2,
        sha256=digest(one.fingerprint for one in entries),
    )
    return PROTOCOL.but(fitted=(judged,))


def test_the_protocol_is_the_one_that_was_frozen() -> None:
    """Any change of it is a new version, on purpose: this test is changed with it."""
    assert (PROTOCOL.version, PROTOCOL.least_runs, len(PROTOCOL.rules)) == (1, 4, 7)
    assert (PROTOCOL.published_time.rows, PROTOCOL.published_memory.rows) == (182, 53)
    assert PROTOCOL.published_time.sha256.startswith("ba5123e1")
    assert PROTOCOL.published_memory.sha256.startswith("75e9d8c8")


def test_held_out_rows_of_published_tables_are_the_frozen_ones() -> None:
    assert published_violations(PROTOCOL) == []
    fewer = PROTOCOL.published_time.but(rows=181)
    assert len(published_violations(PROTOCOL.but(published_time=fewer))) == 1


def test_a_new_source_is_held_out(valid: dict[str, Any]) -> None:
    assert PROTOCOL.split("never-seen") == "heldout"
    assert refit.refit([entry("new", valid)] * 10, PROTOCOL) == []


def test_a_source_is_fitted_only_after_a_release_has_judged_it(valid: dict[str, Any]) -> None:
    entries = [entry("us", valid)]
    assert violations(_released("us", entries, "0.1.0"), entries, now="0.2.0") == []
    (problem,) = violations(_released("us", entries, "0.2.0"), entries, now="0.2.0")
    assert "held out until a release after that" in problem


def test_a_fitted_source_takes_no_more_runs(tmp_path: Path, valid: dict[str, Any]) -> None:
    protocol = _released("us", [entry("us", valid)])
    more = entry("us", record(tmp_path / "more", 1.2))
    (problem,) = violations(protocol, [entry("us", valid), more], now="1.0.0")
    assert "new runs are a new source" in problem
    # As many runs, but not the same.
    assert violations(protocol, [more], now="1.0.0") == [problem]


# ---- refit ----------------------------------------------------------------------------------

SLOWER, NOISE = 1.25, 1.02
FITTED = [
    {"model": "gpt2", "micro_batch": 4},
    {"model": "gpt2", "micro_batch": 16},
    {"model": "gpt2", "micro_batch": 8, "recompute": "full"},
    {"model": "qwen2.5-0.5b", "micro_batch": 2},
    {"model": "qwen2.5-0.5b", "micro_batch": 8},
]
HELD_OUT = [{"model": "gpt2", "micro_batch": 32}, {"model": "qwen2.5-0.5b", "micro_batch": 4}]


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Entry], list[Entry]]:
    """Ten runs on a device that takes 1.25 times the predicted, give or take 2 %; and two others.

    Each configuration was measured twice, once 2 % above and once 2 % below.
    """
    pytest.importorskip("scipy")
    place = tmp_path_factory.mktemp("ten")
    chosen = [
        entry("lab", record(place / f"{n}-{noise}", SLOWER * noise, **fields))
        for n, fields in enumerate(FITTED)
        for noise in (NOISE, 1 / NOISE)
    ]
    held = [
        entry("others", record(place / f"held-{n}", SLOWER, **fields))
        for n, fields in enumerate(HELD_OUT)
    ]
    return chosen, held


@pytest.fixture(scope="module")
def fitted(ten: tuple[list[Entry], list[Entry]]) -> refit.Refit:
    chosen, held = ten
    (found,) = refit.refit([*chosen, *held], _released("lab", chosen))
    return found


def test_ten_contributions_move_the_error_as_arithmetic_says(fitted: refit.Refit) -> None:
    """Before: measured over predicted is 1.25 × 1.02 five times and 1.25 / 1.02 five times.

    Least squares of logarithms puts the prediction in their middle, at 1.25: what is left is the
    noise of 2 %. The prior, some hundred times weaker than ten runs, moves it by far less.
    """
    before = [SLOWER * NOISE - 1] * 5 + [SLOWER / NOISE - 1] * 5
    after = [NOISE - 1] * 5 + [1 - 1 / NOISE] * 5
    assert (fitted.device, fitted.sources) == (DEVICE, ["lab"])
    assert fitted.fitted[0]["rows"] == 10
    assert fitted.fitted[0]["median_error"] == pytest.approx(np.median(before), abs=1e-6)
    assert fitted.fitted[1]["median_error"] == pytest.approx(np.median(after), abs=0.003)
    assert fitted.held_out is not None
    assert fitted.held_out[0]["median_error"] == pytest.approx(SLOWER - 1, abs=1e-6)
    assert fitted.held_out[1]["median_error"] < 0.01


def test_held_out_runs_do_not_change_the_fit(
    ten: tuple[list[Entry], list[Entry]], fitted: refit.Refit, tmp_path: Path
) -> None:
    chosen, _ = ten
    other = entry("others", record(tmp_path / "other", 3.0, micro_batch=2))
    (found,) = refit.refit([*chosen, other], _released("lab", chosen))
    assert found.fit == fitted.fit
    assert found.held_out is not None
    assert found.held_out[0]["median_error"] == pytest.approx(2.0)


def test_written_coefficients_are_used_for_the_device(
    fitted: refit.Refit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = tmp_path / "coefficients.toml"
    copied.write_text(CATALOGUE.read_text())
    monkeypatch.setattr(refit, "CATALOGUE", copied)
    refit.write([fitted])
    once = copied.read_text()
    refit.write([fitted])
    assert copied.read_text() == once
    sections = tomllib.loads(once)
    assert sections.pop(f"device-{DEVICE}").keys() == fitted.fit.calibration.coefficients().keys()
    assert sections == tomllib.loads(CATALOGUE.read_text())
    cluster = find_cluster(f"1x1x{DEVICE}")
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    for cached in (tables.sections, tables.entry):
        cached.cache_clear()
    try:
        used = kernels.coefficients_for(cluster)
    finally:
        monkeypatch.undo()
        for cached in (tables.sections, tables.entry):
            cached.cache_clear()
    assert used is not None
    expected = fitted.fit.calibration.coefficients()
    assert used._asdict() == pytest.approx(expected, rel=1e-5)
