"""The core install in a fresh virtual environment: small, complete, and quick to start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "transformers", "scipy", "pandas", "datasets"}


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a virtual environment with nothing but `pip install shardwise`."""
    folder = tmp_path_factory.mktemp("core")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install = [str(folder / "bin" / "pip"), "install", "--quiet", str(ROOT)]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    return folder / "bin"


@pytest.mark.nightly
def test_it_pulls_in_nothing_heavy(core: Path) -> None:
    listed = subprocess.run(
        [core / "pip", "list", "--format", "json"], capture_output=True, text=True, check=True
    )
    names = {package["name"].lower() for package in json.loads(listed.stdout)}
    assert "shardwise" in names
    assert not names & HEAVY
    assert len(names) < 25


@pytest.mark.nightly
def test_the_examples_of_the_pages_are_in_it(core: Path, tmp_path: Path) -> None:
    words = [str(core / "shardwise"), "examples"]
    subprocess.run(words, cwd=tmp_path, check=True)
    # The bytecode of tests that ran them stays out.
    for file in (ROOT / "examples").rglob("*.*"):
        if "__pycache__" not in file.parts and file.is_file():
            written = tmp_path / file.relative_to(ROOT)
            assert written.read_bytes() == file.read_bytes()
    again = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert again.stderr.startswith("error: the folder examples exists")


@pytest.mark.nightly
def test_estimate_works_in_it(core: Path) -> None:
    words = ("--model", "llama-3-70b", "--cluster", "8x8xH100-SXM", "--recompute", "full", "--json")
    done = subprocess.run(
        [str(core / "shardwise"), "estimate", *words], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["memory"]["verdict"] == "fits"


@pytest.mark.nightly
def test_plans_display_in_it(core: Path, tmp_path: Path) -> None:
    code = "import shardwise; print(shardwise.plan('gpt2', '8xH100-SXM')._repr_html_())"
    command = [str(core / "python"), "-I", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.startswith("<div")


@pytest.mark.nightly
def test_serve_names_its_extra(core: Path) -> None:
    done = subprocess.run(
        [str(core / "shardwise"), "serve"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert 'pip install "shardwise[serve]"' in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.nightly
def test_a_module_needs_torch_and_says_so(core: Path, tmp_path: Path) -> None:
    command = ["estimate", "--model", "json:loads", "--cluster", "8xH100-SXM"]
    done = subprocess.run(
        [core / "shardwise", *command], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "needs torch" in line
    assert "shardwise[train]" in line


@pytest.mark.timing
def test_estimate_starts_within_twice_the_time_of_its_libraries(core: Path) -> None:
    # A busy machine can spoil one series of rounds, hardly three.
    ratios: list[float] = []
    while len(ratios) < 3 and not (ratios and ratios[-1] <= 2.0):
        done = subprocess.run(
            [core / "python", ROOT / "benchmarks" / "startup.py", "--rounds", "15", "--json"],
            capture_output=True,
            text=True,
            check=True,
        )
        ratios.append(json.loads(done.stdout)["ratio_median"])
    assert min(ratios) <= 2.0, ratios
