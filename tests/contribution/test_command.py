"""`shardwise contribute`: shown in full, written only when confirmed; a real run goes through."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measured.files import check
from shardwise.runs.contribution.collect import collect, collect_all
from shardwise.runs.contribution.record import Contribution
from shardwise.runs.record import NAME
from shardwise.spec.run import write_run
from shardwise.step.profile import read_profile, read_profile_file
from tests.command import COMMAND, PATIENCE_S, environment, refusal, shardwise
from tests.contribution.folders import run_of, write_folder
from tests.stacks.runs import tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "run", run_of())


def at_a_terminal(answer: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command with a terminal that answers its question."""
    ours, theirs = pty.openpty()
    try:
        os.write(ours, f"{answer}\n".encode())
        return subprocess.run(
            [*COMMAND, *words], stdin=theirs, capture_output=True, text=True, cwd=folder,
            env=environment(), timeout=PATIENCE_S, check=False,
        )  # fmt: skip
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 1), ("", 1)])
def test_it_is_shown_and_written_only_if_confirmed(folder: Path, answer: str, code: int) -> None:
    done = at_a_terminal(answer, "contribute", "run", folder=folder.parent)
    assert done.returncode == code, done.stderr
    shown = json.loads(done.stdout)
    file = folder.parent / "contribution.json"
    assert file.exists() == (code == 0)
    if file.exists():
        assert json.loads(file.read_text()) == shown


def test_without_a_terminal_it_is_shown_and_not_written(folder: Path) -> None:
    done = shardwise("contribute", "run", folder=folder.parent)
    assert (done.returncode, json.loads(done.stdout)["schema"]) == (2, 1)
    assert "--yes" in done.stderr
    assert not (folder.parent / "contribution.json").exists()


def test_json_only_shows(folder: Path) -> None:
    done = shardwise("contribute", "run", "--json", folder=folder.parent)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kind"] == "contribution"
    assert not (folder.parent / "contribution.json").exists()


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda run: (run / "measurement.json").unlink(), "measurement.json"),
        (lambda run: (run / "run.toml").unlink(), "run.toml"),
        (lambda run: (run / NAME).write_text("{"), NAME),
        (lambda run: change(run / NAME, state="training"), "not ended"),
        (lambda run: change(run / "environment.json", gpus=["NVIDIA H100 80GB HBM3"]), "reported"),
    ],
)
def test_a_folder_that_is_no_finished_run_is_refused(folder: Path, spoil: Any, named: str) -> None:
    spoil(folder)
    (problem,) = refusal("contribute", str(folder), "--yes", "-o", str(folder / "out.json"))
    assert named in problem
    assert not (folder / "out.json").exists()


def test_a_run_without_environment_is_contributed_without_versions(folder: Path) -> None:
    (folder / "environment.json").unlink()
    done = shardwise("contribute", "run", "--json", folder=folder.parent)
    assert json.loads(done.stdout)["host"] == {"versions": {}}


def test_both_sides_are_the_profiles_of_the_run(folder: Path) -> None:
    done = shardwise("contribute", "run", "--json", folder=folder.parent)
    record = Contribution.of_file(json.loads(done.stdout), "stdout")
    for name, profile in zip(("prediction", "measurement"), record.profiles(), strict=True):
        known = read_profile_file(folder / f"{name}.json")
        again = read_profile(json.loads(json.dumps(profile.to_dict())), name)
        assert (again.time, again.traffic, again.work) == (known.time, known.traffic, known.work)
        assert again.throughput == known.throughput
        assert again.known_memory.terms == known.known_memory.terms


def test_runs_of_an_acceptance_are_files_of_their_own(folder: Path, tmp_path: Path) -> None:
    record = json.loads(shardwise("contribute", "run", "--json", folder=folder.parent).stdout)
    runs = [
        {"layout": "ddp", "contribution": record},
        {"layout": "../../my secret", "contribution": record},
        {"layout": "zero3", "busy_share": 0.4},
    ]
    (tmp_path / "accept.json").write_text(json.dumps({"kind": "accept", "runs": runs}))
    done = shardwise("contribute", "accept.json", "--yes", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    written = sorted(path.name for path in tmp_path.glob("contribution*"))
    assert written == ["contribution-2.json", "contribution-ddp.json"]
    assert json.loads((tmp_path / "contribution-ddp.json").read_text()) == record
    assert json.loads(done.stdout) == [record, record]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"kind": "accept", "runs": [{"layout": "ddp"}]}, "does nothing else"),
        ({"kind": "plan"}, "neither a run folder nor"),
        ({"kind": "accept", "runs": [{"contribution": {"kind": "x"}}]}, "is not a contribution"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: object, named: str) -> None:
    (tmp_path / "it.json").write_text(json.dumps(content))
    (problem,) = refusal("contribute", str(tmp_path / "it.json"), "--yes")
    assert named in problem


def accepted(folder: Path, *runs: tuple[object, Any]) -> Path:
    """A file of accept with these layouts and contributions."""
    path = folder / "accept.json"
    listed = [{"layout": layout, "contribution": one} for layout, one in runs]
    path.write_text(json.dumps({"kind": "accept", "runs": listed}))
    return path


def test_each_run_of_an_acceptance_has_a_name_of_its_own(folder: Path) -> None:
    one = collect(folder)
    record = one.to_dict()
    named = [("../../evil", record), ("1", record), ("ddp", record), ("ddp", record), (7, record)]
    assert list(collect_all(accepted(folder, *named))) == ["1", "1-2", "ddp", "ddp-4", "5"]


def test_impossible_numbers_of_an_acceptance_are_not_written(folder: Path) -> None:
    record = collect(folder).to_dict()
    record["parameters"] = 7
    path = accepted(folder, ("ddp", record))
    (problem,) = refusal("contribute", str(path), "--yes", "-o", str(folder / "out.json"))
    assert "the shapes have" in problem
    assert not list(folder.glob("out*"))


def test_all_files_are_written_or_none(folder: Path) -> None:
    record = collect(folder).to_dict()
    path = accepted(folder, ("ddp", record), ("zero3", record))
    (folder / "out-zero3.json").mkdir()
    (problem,) = refusal("contribute", str(path), "--yes", "-o", str(folder / "out.json"))
    assert "out-zero3.json" in problem
    assert not (folder / "out-ddp.json").exists()


def nested(path: Path) -> None:
    path.write_text("[" * 100_000)


def put_model(run: Path, model: dict[str, Any]) -> None:
    change(run / "prediction.json", model=model)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda run: put_model(run, {"name": "gpt2", "parameters": "ours"}), "parameters"),
        (lambda run: put_model(run, {}), "parameters"),
        (lambda run: nested(run / "environment.json"), "environment.json"),
        (lambda run: change(run / "environment.json", cores=10**30), "cores"),
        (lambda run: change(run / "environment.json", threads=10**30), "threads"),
        (lambda run: change(run / NAME, step=10**15), "steps"),
    ],
)
def test_a_spoiled_folder_is_refused_in_a_sentence(folder: Path, spoil: Any, named: str) -> None:
    spoil(folder)
    (problem,) = refusal("contribute", str(folder), "--json")
    assert named in problem


@pytest.mark.parametrize("text", ["[" * 100_000, '{"kind": "accept", "runs": 5}'])
def test_a_spoiled_accept_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "accept.json").write_text(text)
    (problem,) = refusal("contribute", str(tmp_path / "accept.json"), "--json")
    assert problem.startswith("contribute: ")


def test_a_folder_of_runs_names_a_run_inside(folder: Path) -> None:
    (problem,) = refusal("contribute", str(folder.parent), "--json")
    assert f"give {folder}" in problem


def test_only_a_contribution_is_overwritten(folder: Path) -> None:
    other = folder / "notes.json"
    other.write_text('{"mine": 1}')
    (problem,) = refusal("contribute", str(folder), "--yes", "-o", str(other))
    assert "is no contribution" in problem
    (problem,) = refusal("contribute", str(folder), "--yes", "-o", str(folder / "new.txt"))
    assert "not a .json file" in problem
    assert other.read_text() == '{"mine": 1}'
    other.write_text(json.dumps(collect(folder).to_dict()))
    done = shardwise("contribute", "run", "--yes", "-o", "run/notes.json", folder=folder.parent)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.glob("*notes*")] == ["notes.json"]


def set_spread(run: Path, low: float, high: float) -> None:
    """Percentiles of the step time, as shares of the median."""
    data = json.loads((run / "measurement.json").read_text())
    step_s = data["time"]["step_s"]
    data["time"]["step_s_spread"] = [low * step_s, high * step_s]
    (run / "measurement.json").write_text(json.dumps(data))


def test_an_unsteady_run_is_asked_about_and_not_written_by_scripts(folder: Path) -> None:
    set_spread(folder, 0.6, 2.0)
    done = shardwise("contribute", "run", "--yes", folder=folder.parent)
    assert (done.returncode, json.loads(done.stdout)["kind"]) == (2, "contribution")
    assert "does nothing else" in done.stderr
    assert not (folder.parent / "contribution.json").exists()
    done = at_a_terminal("y", "contribute", "run", folder=folder.parent)
    assert done.returncode == 0, done.stderr
    assert "does nothing else" in done.stderr
    assert (folder.parent / "contribution.json").exists()


def test_accept_refuses_an_empty_choice() -> None:
    (problem,) = refusal("doctor", "--only", "")
    assert problem.startswith("--only")


# Its step is judged in seconds: on a machine with other work it is too slow for what it computes.
@pytest.mark.nightly
@pytest.mark.timing
def test_a_real_run_goes_through_the_checker(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    train = {"steps": 9, "measure": True, "checkpoint": False}
    run = tiny(cluster="1x1xCPU", strategy={"kind": "single"}, train=train)
    (tmp_path / "run.toml").write_text(write_run(run))
    done = shardwise("train", "run.toml", "--name", "it", folder=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    # Tests may share the machine.
    set_spread(tmp_path / "runs" / "it", 1.0, 1.0)
    runs = tmp_path / "measured"
    (runs / "us").mkdir(parents=True)
    words = ("contribute", "runs/it", "-o", str(runs / "us" / "it.json"), "--yes")
    done = shardwise(*words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    checked = check(runs)
    assert checked.problems == []
    (entry,) = checked.entries
    measured = json.loads((tmp_path / "runs" / "it" / "measurement.json").read_text())
    assert entry.run.measured.time is not None
    assert entry.run.measured.time.step_s == measured["time"]["step_s"]
    assert entry.run.hardware.label == "CPU"
    assert entry.run.host.versions["python"]
