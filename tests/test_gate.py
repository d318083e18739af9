"""What a gate and a night run, and what the gate may cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import budget
from tests.parts import FILES, PARTS, part_of, part_of_item

ROOT = Path(__file__).resolve().parents[1]


def collected(*words: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 5), done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_every_test_that_this_session_collected_has_one_part_at_most(
    request: pytest.FixtureRequest,
) -> None:
    """A file that no part names raises; a marker of a nightly test without a part would show."""
    for item in request.session.items:
        nightly = item.get_closest_marker("nightly") or item.get_closest_marker("hypothesis")
        assert (part_of_item(item) in PARTS) == bool(nightly), item.nodeid


def test_every_folder_has_its_part() -> None:
    """So that the first nightly test of a folder needs no thought."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        assert part_of(path.relative_to(ROOT).as_posix(), {"nightly"}) in PARTS


def test_the_longest_name_decides_and_markers_before_it() -> None:
    assert part_of("tests/distributed/test_new.py", {"nightly"}) == "runs"
    assert part_of("tests/distributed/test_hosts.py", {"nightly"}) == "hosts"
    assert part_of("tests/distributed/test_hosts.py", {"nightly", "timing"}) == "timing"
    assert part_of("tests/distributed/test_hosts.py", {"hypothesis"}) == "random"
    assert part_of("tests/distributed/test_hosts.py", set()) is None
    with pytest.raises(pytest.UsageError, match="test_new"):
        part_of("tests/unheard_of/test_new.py", {"nightly"})
    starts = [start for part in FILES.values() for start in part]
    assert len(starts) == len(set(starts))


def test_the_nightly_workflow_runs_every_part() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())
    matrix = workflow["jobs"]["nightly"]["strategy"]["matrix"]
    assert sorted(matrix["part"]) == sorted(PARTS)


@pytest.mark.nightly
def test_the_parts_run_every_nightly_test_once() -> None:
    parts = [name for part in PARTS for name in collected(f"--part={part}")]
    gate = collected("-m", "not nightly")
    assert len(parts) == len(set(parts))
    # What hypothesis draws runs in both: few examples in the gate, many at night.
    assert set(parts) | set(gate) == set(collected())
    assert set(parts) >= set(collected("-m", "nightly"))


# ---- the budget -----------------------------------------------------------------------------


def a_run(folder: Path, slow: float) -> Path:
    """What two workers write, whose piece of work takes 0.2 s: 100 and `slow` units."""
    folder.mkdir()
    fast = {"tests/a/test_one.py::test_x": 12.0, "tests/a/test_two.py::test_y": 8.0}
    for number, tests in enumerate((fast, {"tests/b/test_z.py::test_z[1]": slow * 0.2})):
        written = {"pieces": [0.1, 0.2, 0.9], "tests": tests}
        (folder / f"{number}.json").write_text(json.dumps(written))
    return folder


@pytest.fixture
def budgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "budget.toml"
    path.write_text('# Why.\n\n[units]\n"tests/a" = 100\n"tests/b" = 100\n')
    monkeypatch.setattr(budget, "ROOT", tmp_path)
    monkeypatch.setattr(budget, "BUDGETS", path)
    return path


@pytest.mark.parametrize(
    ("slow", "above", "code"),
    [(99, False, 0), (149, True, 0), (151, True, 1)],
)
def test_a_folder_above_its_budget_is_named_and_far_above_it_fails(
    tmp_path: Path, budgets: Path, capsys: pytest.CaptureFixture[str],
    slow: float, above: bool, code: int,
) -> None:  # fmt: skip
    folder = a_run(tmp_path / "cpu", slow)
    assert budgets.exists()
    assert budget.check(folder) == code
    assert ("test_z[1]" in capsys.readouterr().out) == above
    used = budget.read_usage(folder).folders()
    assert used == {"tests/a": pytest.approx(100), "tests/b": pytest.approx(slow)}


def test_a_folder_without_a_budget_fails(
    tmp_path: Path, budgets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budgets.write_text('[units]\n"tests/a" = 100\n')
    assert budget.check(a_run(tmp_path / "cpu", 1)) == 1
    assert "test_z[1]" in capsys.readouterr().out


def test_a_finished_run_becomes_the_budget(tmp_path: Path, budgets: Path) -> None:
    folder = a_run(tmp_path / "cpu", 500)
    assert budget.check(folder) == 1
    budget.write(folder)
    assert budget.check(folder) == 0
    assert budget.read_budgets() == {"tests/a": 120, "tests/b": 600}
    assert budgets.read_text().startswith("# Why.\n")


def test_what_a_run_did_not_have_keeps_its_budget_while_it_exists(
    tmp_path: Path, budgets: Path
) -> None:
    (tmp_path / "tests" / "c").mkdir(parents=True)
    with budgets.open("a") as file:
        file.write('"tests/c" = 7\n"tests/gone" = 8\n')
    budget.write(a_run(tmp_path / "cpu", 1))
    assert budget.read_budgets() == {"tests/a": 120, "tests/b": budget.SMALLEST, "tests/c": 7}


def test_every_folder_of_the_gate_has_a_budget(request: pytest.FixtureRequest) -> None:
    """Of those that this session has collected: all, in the gate."""
    in_gate = {
        budget.folder_of(item.nodeid)
        for item in request.session.items
        if not item.get_closest_marker("nightly") and not item.get_closest_marker("cuda")
    }
    budgets = budget.read_budgets()
    assert in_gate <= set(budgets)
    assert all((ROOT / name).exists() for name in budgets if name != budget.STARTED)


# The same CPU time in a child's child, in a fork server's child, and in a child that still runs.
WORKED_S = 0.5
WORKS = f"""
import subprocess, sys, time
from multiprocessing import get_context

def work():
    start = time.process_time()
    while time.process_time() < start + {WORKED_S}:
        pass

def start(*words):
    return subprocess.Popen([sys.executable, __file__, *words], stdin=-1, stdout=-1, text=True)

def test_that_waits():
    start("child").communicate()

def test_that_leaves_a_fork_server():
    start("fork server").communicate()

def test_that_leaves_a_child():
    global left
    left = start("that stays")
    assert left.stdout.readline() == "worked\\n"

def test_that_is_idle():
    left.communicate()

if __name__ == "__main__":
    if sys.argv[1] == "child":
        subprocess.run([sys.executable, __file__, "child's child"])
    elif sys.argv[1] == "fork server":
        process = get_context("forkserver").Process(target=work)
        process.start()
        process.join()
    else:
        work()
        print("worked", flush=True)
        sys.stdin.read()
"""


def test_every_process_that_a_test_starts_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "test_works.py"
    file.write_text(WORKS)
    words = ["-q", "-p", "xdist", "-p", "tests.conftest", "--rootdir", str(tmp_path), str(file)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "-n", "1", "--cpu", str(tmp_path / "cpu")],
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    usage = budget.read_usage(tmp_path / "cpu")
    seconds = {name.partition("::")[2]: used for name, used in usage.tests.items()}
    assert seconds["test_that_waits"] > 0.9 * WORKED_S
    assert seconds["test_that_leaves_a_fork_server"] > 0.9 * WORKED_S
    assert seconds["test_that_leaves_a_child"] > 0.9 * WORKED_S
    assert seconds["test_that_is_idle"] < 0.9 * WORKED_S
    assert usage.piece > 0
