"""Screens of the commands that train, check and verify, and their answers to invalid input."""

from __future__ import annotations

import os
import pty
import re
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from shardwise.checkpoint.dcp.load import Loaded
from shardwise.checkpoint.export.weights import ExportedWeights
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.verify.fsck import find_checkpoints, verify_checkpoint
from shardwise.observe.observation import Observation, units_of
from shardwise.predict.api import estimate_run
from shardwise.report.calibrate import print_fit
from shardwise.report.doctor import print_checks
from shardwise.report.export_weights import print_exported
from shardwise.report.fsck import print_checked
from shardwise.report.machine import print_doubts, print_machine
from shardwise.report.train import TrainScreen
from shardwise.spec.calibration import Calibration
from shardwise.spec.progress import Stages
from shardwise.spec.run import RunSpec, read_run
from shardwise.step.profile import MemoryProfile, TimeProfile
from shardwise.trainer.data.packing import DataStatistics
from shardwise.trainer.run import Result
from shardwise.trials.calibrate.fit import CPU, Fit
from shardwise.trials.calibrate.machine.collectives import Collective, Message
from shardwise.trials.calibrate.machine.compute import Compute, Product
from shardwise.trials.calibrate.machine.line import Line
from shardwise.trials.calibrate.machine.measure import Machine
from shardwise.trials.calibrate.machine.quality import find_doubts
from shardwise.trials.calibrate.machine.timing import Timing
from shardwise.trials.doctor.check import Check
from tests.checkpoint.ours import file_name, write_ours
from tests.command import refusal
from tests.screens import assert_screen

RUN = 'model = "gpt2"\ncluster = "1x2xCPU"\nstrategy = "zero3"\n[train]\nsteps = 200\n'


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def run(tmp_path: Path) -> RunSpec:
    (tmp_path / "run.toml").write_text(RUN)
    return read_run(tmp_path / "run.toml").resolved()


def of_8_gib(text: str) -> str:
    """A screen as on a machine with 8 GiB for each process."""
    text = re.sub(r"of [\d.]+ GiB", "of 8.00 GiB", text)
    return re.sub(r"usable [\d.]+ GiB", "usable 6.50 GiB", text)


VALUES = {"loss": 3.25, "gradient_norm": 1.5, "skipped": 0.0, "tokens_per_s": 4096.0, "step_s": 0.5}


def test_a_training_from_start_to_end(run: RunSpec, capsys: pytest.CaptureFixture[str]) -> None:
    predicted = estimate_run(run)
    peak = predicted.known_memory.peak_allocated_bytes
    measured = predicted._replace(
        memory=MemoryProfile(peak_allocated_bytes=peak, terms=predicted.known_memory.terms),
        time=TimeProfile(step_s=0.5, step_s_spread=(0.45, 0.6)),
    )
    folder = Path("runs/it")
    screen = TrainScreen("shardwise train run.toml --name it --resume")
    manifest = Manifest(step=20, world=2, sequences=640, run={}, versions={})
    loaded = Loaded(manifest, ["step-00000030: layout.json does not match its checksum"])
    screen.started(run, predicted, folder, loaded)
    screen.logged(40, VALUES)
    screen.logged(200, {**VALUES, "skipped": 2.0})
    screen.ended(Result("done", 200, folder, predicted, measured, VALUES))
    text = capsys.readouterr().out
    # The memory of this machine.
    assert_screen("train", of_8_gib(text))


def test_a_training_on_a_terminal_keeps_its_lines_above_a_bar(
    run: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pty.openpty()
    done = [0]
    with os.fdopen(theirs, "w") as terminal, os.fdopen(ours, "rb", buffering=0) as reader:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stdout", terminal)
        screen = TrainScreen()
        screen.started(run, estimate_run(run), Path("runs/it"), None, None, lambda: done[0])
        screen.logged(40, VALUES)
        done[0] = 41
        seen = b""
        while b"41/200" not in seen:  # the bar looks by itself
            seen += reader.read(4096)
        screen.close()
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", seen.decode())
    assert "step  40/200  loss 3.2500" in text
    assert text.index("step  40/200") < text.index("41/200")


def test_the_stage_of_a_command_is_one_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal, os.fdopen(ours, "rb", buffering=0) as reader:
        monkeypatch.setattr(sys, "stderr", terminal)
        stages = Stages()
        stages.begin("Not asked for")
        stages.show()
        stages.begin("Importing torch")
        stages.begin("Building the model")
        stages.end()
        terminal.write("end")
        terminal.flush()
        read = b""
        while not read.endswith(b"end"):
            read += reader.read(4096)
    seen = read.decode().removesuffix("end")
    assert "Not asked for" not in seen
    assert seen.index("Importing torch … 0 s\r") < seen.index("Building the model … 0 s\r")
    assert seen.endswith("\r\x1b[K")
    assert "\n" not in seen


def test_a_training_on_chat_examples(run: RunSpec, capsys: pytest.CaptureFixture[str]) -> None:
    data = DataStatistics(
        examples=52_002, tokens=6_310_000, loss_tokens=3_155_000, median=98, p95=301, longest=2_104,
        cut=12, dropped=3, sequences=6_200, seq_len=1024, filled=0.987, packing=True,
    )  # fmt: skip
    screen = TrainScreen()
    screen.started(run, estimate_run(run), Path("runs/it"), None, data)
    screen.logged(40, VALUES)
    text = capsys.readouterr().out
    # The memory of this machine.
    assert_screen("train-chat", of_8_gib(text))


def test_a_training_that_a_signal_stops(run: RunSpec, capsys: pytest.CaptureFixture[str]) -> None:
    predicted, folder = estimate_run(run), Path("runs/it")
    screen = TrainScreen("shardwise train run.toml --name it --resume")
    saved = "runs/it/checkpoints/step-00000120"
    stopped = Result("stopped", 120, folder, predicted, None, VALUES, (), 2, saved)
    screen.ended(stopped)
    screen.ended(stopped._replace(steps=0, stopped_by=10, checkpoint=None))
    screen.ended(stopped._replace(reason="data ended", stopped_by=None))
    assert_screen("train-ends", capsys.readouterr().out)


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    checks = [
        Check("memory headroom", True, "needs 11.2 GiB, 63.9 GiB usable on 8xH100-SXM, predicted"),
        Check("data readable", None, "my.data:batches is checked below"),
        Check("equal micro-batch counts", True, "2 per step on each of 2 ranks"),
    ]
    print_checks(checks, 2)
    wrong = Check("data readable", False, "data.path: gone.jsonl does not exist")
    print_checks([*checks[:1], wrong], 2)
    assert_screen("doctor", capsys.readouterr().out)


def test_fsck(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (10, 20):
        write_ours(tmp_path / f"step-{step:08d}", {"weight": np.arange(64, dtype=np.float32)})
    (tmp_path / "step-00000030.unfinished").mkdir()
    damaged = tmp_path / "step-00000020" / file_name(1)
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    found = find_checkpoints(str(tmp_path))
    checked = [verify_checkpoint(folder) for folder in found.folders]
    assert [one.intact for one in checked] == [True, False]
    print_checked(checked, found.incomplete, 0.5)
    assert_screen("fsck", capsys.readouterr().out.replace(str(tmp_path), "checkpoints"))


def test_export_weights(capsys: pytest.CaptureFixture[str]) -> None:
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    exported = ExportedWeights(
        20, "exported", 2_471_645_608, 147, ("bfloat16",), files, "",
        ("step-00000030: rank-00001.safetensors is missing",),
    )  # fmt: skip
    print_exported(exported)
    print_exported(exported._replace(no_config="my.model:make is not a transformers model"))
    assert_screen("export-weights", capsys.readouterr().out)


def test_calibrate_by_measuring(capsys: pytest.CaptureFixture[str]) -> None:
    timing = Timing((0.01, 0.011, 0.012, 0.5))
    compute = Compute([Product("bf16", 1024, timing)], 5e10, 2e10, 1.5e10, 4e-6, 8e9)
    line = Line(2e-5, 1.25e9, (1.1e9, 1.4e9), 0.998)
    collective = Collective("all_gather", "inside a node", 2, [Message(1 << 20, timing)], line)
    machine = Machine("CPU", "gloo", 8 << 30, 1, 2, compute, [collective], 0.25)
    print_machine(machine, 31.0)
    assert not list(find_doubts(machine))
    assert_screen("calibrate", capsys.readouterr().out)


def test_a_busy_machine_is_not_calibrated_without_a_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    slow = Timing.of([0.01, 0.012, 0.02, 0.03, 0.04, 0.05])
    compute = Compute([Product("bf16", 1024, slow)], 5e10, 2e10, 1.5e10, 4e-6, 8e9)
    line = Line(2e-5, 1.25e9, (1.1e9, 1.4e9), 0.44)
    collective = Collective("all_gather", "inside a node", 2, [Message(1 << 20, slow)], line)
    machine = Machine("CPU", "gloo", 8 << 30, 1, 2, compute, [collective], 0.25, load=0.7)
    found = list(find_doubts(machine))
    assert [doubt.kind for doubt in found] == ["load", "spread", "fit"]
    print_doubts(found, is_written=False)
    assert_screen("calibrate-busy", capsys.readouterr().out)


def test_calibrate_from_runs(run: RunSpec, capsys: pytest.CaptureFixture[str]) -> None:
    observation = Observation(run, units_of(run), 0.5, None, None)
    fit = Fit(Calibration(**CPU._asdict(), source="fitted", interval=(-0.08, 0.11)), [0.021])
    print_fit(run.cluster, [observation], fit, [Path("runs/a")])
    assert_screen("calibrate-from-runs", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "location"),
    [
        (("train", "gone.toml"), "gone.toml"),
        (("train", "run.toml", "--resume"), "--resume"),
        (("train", "wrong.toml"), "train.stepss"),
        (("doctor", "gone.toml"), "gone.toml"),
        (("doctor", "wrong.toml"), "train.stepss"),
        (("doctor", "text.toml"), "text.toml"),
        (("calibrate", "-o", "cluster.json"), "--output"),
        (("calibrate", "--from-run", "gone"), "gone"),
        (("calibrate", "--network", "fast"), "--network"),
        (("fsck", "gone"), "gone"),
        (("fsck", "run.toml"), "run.toml"),
        (("fsck", "."), "fsck"),
        (("export-weights", "gone", "-o", "out"), "gone"),
        (("export-weights", ".", "-o", "out", "--shard-size", "many"), "--shard-size"),
        (("export-weights", ".", "-o", "nowhere/out"), "--output"),
    ],
)
def test_invalid_input_is_one_sentence_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], location: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "wrong.toml").write_text(RUN.replace("steps", "stepss"))
    (tmp_path / "text.toml").write_text("a run, please")
    problems = refusal(*words)
    assert len(problems) == 1
    assert location in problems[0]
    assert "\n" not in problems[0]
