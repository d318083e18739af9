"""`shardwise runs`: real small runs, listed, compared and queried; its screens; invalid input."""

from __future__ import annotations

import csv
import io
import json
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardwise.report.runs import print_comparison, print_runs
from shardwise.runs.compare import compare_runs
from shardwise.runs.find import find_runs
from shardwise.runs.query import read_conditions, sort_runs
from shardwise.runs.record import LOST_AFTER_S, NAME, RunRecord, is_done
from shardwise.spec.record import SpecError
from shardwise.spec.run import write_run
from tests.command import refusal, shardwise
from tests.fleet.running import training
from tests.screens import assert_screen
from tests.stacks.runs import tiny


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


def record(name: str, **fields: Any) -> RunRecord:
    values = {"loss": 2.3456, "gradient_norm": 0.81, "step_s": 0.412, "tokens_per_s": 159_000.0}
    settings = {
        "strategy": {"kind": "zero3", "micro_batch": 2},
        "train": {"learning_rate": 3e-4, "seed": 0, "measure": True},
        "model": {"layers": 16},
    }
    usual: dict[str, Any] = {
        "schema": 1, "name": name, "state": "done", "started": 1.0, "updated": 2.0, "step": 20_000,
        "planned_steps": 20_000, "model": "llama-3.2-1b", "parameters": 1_235_814_400,
        "strategy": "zero3", "cluster": "1x8xH100-SXM", "devices": 8, "version": "0.2.0",
        "values": {**values, "mfu": 0.412, **fields.pop("values", {})},
        "predicted_step_s": 0.4, "peak_bytes": 9 << 30, "predicted_peak_bytes": 8 << 30,
        "settings": {key: part | fields.pop(key, {}) for key, part in settings.items()},
    }  # fmt: skip
    return RunRecord(**{**usual, **fields})


BASE = record("base", started=1.0)
FASTER = record(
    "higher-rate", started=2.0, train={"learning_rate": 6e-4}, values={"loss": 2.1, "step_s": 0.309}
)
BROKEN = record("broken", started=3.0, state="failed", step=700, planned_steps=100_000)
CURRENT = record("20261117-run", started=4.0, state="training", step=4_800, recoveries=2)
SILENT = msgspec.structs.replace(record("silent", started=5.0, state="lost", step=0), values={})
ALL = [SILENT, CURRENT, BROKEN, FASTER, BASE]


def write(folder: Path, runs: list[RunRecord]) -> None:
    for run in runs:
        (folder / run.name).mkdir(parents=True)
        (folder / run.name / NAME).write_bytes(msgspec.json.encode(run))


# ---- screens --------------------------------------------------------------------------------


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    print_runs(ALL, 5, "runs", ["runs/cut/run.json: Input data was truncated"], [])
    print_runs([FASTER, BASE], 5, "s3://bucket/runs", [], ["train.learning_rate", "mfu"])
    print_runs([], 5, "runs", [], [])
    assert_screen("runs", capsys.readouterr().out)


def test_the_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    print_comparison(compare_runs([BASE, FASTER]))
    print_comparison(compare_runs([BASE, BROKEN, CURRENT]))
    assert_screen("runs-compare", capsys.readouterr().out)


# ---- what is compared and chosen ------------------------------------------------------------


def test_a_comparison_names_the_settings_that_differ() -> None:
    compared = compare_runs([BASE, FASTER])
    assert [row.key for row in compared.settings] == ["train.learning_rate"]
    changes = {row.key: row.change for row in compared.results}
    assert changes["step_s"] == pytest.approx(0.309 / 0.412 - 1)
    assert changes["state"] is None


@pytest.mark.parametrize(
    ("conditions", "names"),
    [
        (["loss<2.2"], ["higher-rate"]),
        (["state=done", "train.learning_rate<=0.0003"], ["base"]),
        (["name=b*"], ["broken", "base"]),
        (["state!=done", "step>0"], ["20261117-run", "broken"]),
        (["train.measure=true", "devices=8", "recoveries>=2"], ["20261117-run"]),
        (["name=20261117"], []),
        (["model>1"], []),
    ],
)
def test_conditions(conditions: list[str], names: list[str]) -> None:
    read = read_conditions(conditions)
    assert [run.name for run in ALL if all(one.holds(run) for one in read)] == names


def test_a_run_without_a_value_comes_last() -> None:
    unknown = record("unknown", values={"loss": 1.0})
    without = msgspec.structs.replace(unknown, values={})
    for key, names in (("loss", ["higher-rate", "base"]), ("-loss", ["base", "higher-rate"])):
        found = [run.name for run in sort_runs([without, BASE, FASTER], key)]
        assert found == [*names, "unknown"]


# ---- files ----------------------------------------------------------------------------------


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    write(tmp_path, [BASE, FASTER])
    assert find_runs(str(tmp_path), now=3.0).runs == [FASTER, BASE]
    assert find_runs(str(tmp_path / "base"), now=3.0).runs == [BASE]


def test_replica_groups_are_named_after_their_run(tmp_path: Path) -> None:
    for run in ("first", "second"):
        write(tmp_path / run, [record("replica-0", started=1.0)])
    assert sorted(run.name for run in find_runs(str(tmp_path), now=3.0).runs) == [
        *("first/replica-0", "second/replica-0"),
    ]
    [alone] = find_runs(str(tmp_path / "first"), now=3.0).runs
    assert alone.name == "first/replica-0"


def test_a_run_is_done_after_the_steps_it_was_asked_for() -> None:
    done = record("it", started=1.0, state="done", step=40, planned_steps=40)
    assert is_done(msgspec.json.encode(done), 40)
    assert not is_done(msgspec.json.encode(done), 80)  # it is resumed for more
    trains = record("it", started=1.0, state="training", step=40, planned_steps=40)
    assert not is_done(msgspec.json.encode(trains), 40)
    assert not is_done(b"{", 40)


def test_a_run_that_is_not_updated_is_lost(tmp_path: Path) -> None:
    write(tmp_path, [CURRENT])
    for silent_s, state in ((LOST_AFTER_S, "training"), (LOST_AFTER_S + 1, "lost")):
        [run] = find_runs(str(tmp_path), now=CURRENT.updated + silent_s).runs
        assert run.state == state


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    write(tmp_path, [BASE, msgspec.structs.replace(FASTER, schema=2, version="9.0")])
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / NAME).write_text('{"schema": 1, "na')
    found = find_runs(str(tmp_path))
    assert [run.name for run in found.runs] == ["base"]
    assert [Path(problem.partition(":")[0]).parent.name for problem in found.problems] == [
        "cut", "higher-rate",
    ]  # fmt: skip


def test_runs_of_a_bucket() -> None:
    """A store of fsspec in memory stands for one in a network."""
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    try:
        for run in (BASE, FASTER):
            store.pipe_file(f"/bucket/runs/{run.name}/{NAME}", msgspec.json.encode(run))
            store.pipe_file(f"/bucket/runs/{run.name}/step-00000010/manifest.json", b"{}")
        assert find_runs("memory://bucket/runs", now=3.0).runs == [FASTER, BASE]
        assert find_runs("memory://bucket/runs/base", now=3.0).runs == [BASE]
        with pytest.raises(SpecError, match="memory://bucket/none has no runs"):
            find_runs("memory://bucket/none")
    finally:
        store.rm("/bucket", recursive=True)


# ---- real runs ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three real runs: one done, one stopped, one killed; checkpoints of the first go elsewhere."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("trained")
    settings = {"steps": 6, "measure": True, "checkpoint": {"to": str(folder / "saved")}}
    run = tiny(cluster="1x1xCPU", strategy={"kind": "single"}, train=settings)
    (folder / "run.toml").write_text(write_run(run))
    done = shardwise("train", "run.toml", "--name", "short", folder=folder, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    for how in (signal.SIGTERM, signal.SIGKILL):
        with training(folder, learning_rate=1e-3) as running:
            running.wait_until(lambda: len(running.logged()) >= 2)
            running.process.send_signal(how)
            running.process.wait()
            running.run_folder.rename(folder / "runs" / how.name.lower())
    return folder


def listed(folder: Path, *words: str) -> Any:
    done = shardwise("runs", *words, "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_real_runs_are_listed(trained: Path) -> None:
    found = {run["name"]: run for run in listed(trained)["runs"]}
    short = found["short"]
    lines = (trained / "runs" / "short" / "metrics.jsonl").read_text().splitlines()
    assert short["loss"] == json.loads(lines[-1])["loss"]
    assert (short["state"], short["step"], short["planned_steps"]) == ("done", 6, 6)
    assert short["checkpoint"].endswith("saved/short/step-00000006")
    measured = json.loads((trained / "runs" / "short" / "measurement.json").read_text())
    assert short["peak_bytes"] == measured["memory"]["peak_allocated_bytes"]
    assert short["train.learning_rate"] == 1e-2
    # Killed: its file still says "training", until it has been silent for long enough.
    states = {"short": "done", "sigterm": "stopped", "sigkill": "training"}
    assert {path.parent.name: json.loads(path.read_text())["state"]
            for path in trained.glob(f"runs/*/{NAME}")} == states  # fmt: skip
    later = find_runs(str(trained / "runs"), now=time.time() + LOST_AFTER_S + 1).runs
    assert {run.name: run.state for run in later} == {**states, "sigkill": "lost"}


def test_the_record_is_beside_checkpoints_elsewhere(trained: Path) -> None:
    [beside] = listed(trained, "saved")["runs"]
    [own] = listed(trained, "runs/short")["runs"]
    assert beside == own


def test_real_runs_are_queried_and_compared(trained: Path) -> None:
    where = ("--where", "state=stopped", "--where", "train.learning_rate<0.01")
    assert [run["name"] for run in listed(trained, *where)["runs"]] == ["sigterm"]
    compared = listed(trained, "--compare", "short,sigterm")["compared"]
    assert compared["train.learning_rate"] == {"short": 1e-2, "sigterm": 1e-3}
    assert "train.seed" not in compared
    none = shardwise("runs", "--where", "step>1e12", folder=trained)
    assert none.returncode == 1
    rows = shardwise("runs", "--sort", "step", "--csv", folder=trained).stdout
    steps = [int(row["step"]) for row in csv.DictReader(io.StringIO(rows))]
    assert steps == sorted(steps)
    assert len(steps) == 3


# ---- invalid input --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "location"),
    [
        (("gone",), "gone"),
        ((".",), "runs"),
        (("runs", "--where", "loss"), "--where"),
        (("runs", "--where", "loss<low"), "--where"),
        (("runs", "--where", "lose<1"), "did you mean 'loss'"),
        (("runs", "--sort", "-tokens"), "--sort"),
        (("runs", "--show", "nothing"), "--show"),
        (("runs", "--compare", "base"), "--compare"),
        (("runs", "--compare", "base,bas"), "--compare"),
        (("runs", "--compare", "a,b,c,d,e"), "--compare"),
        (("runs", "--csv", "--json"), "output"),
    ],
)
def test_invalid_input_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], location: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "runs", [BASE])
    [problem] = refusal("runs", *words)
    assert location in problem
