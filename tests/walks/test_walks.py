"""Newcomers' walks, for real: a fresh virtual environment outside the checkout, nothing else.

Each walk names its pages and uses only commands that README or those pages show. The package is
installed as a newcomer gets it: built as a wheel, without the checkout on any path.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WALKS = Path(__file__).parent
SCRIPTS = sorted(path for path in WALKS.glob("*.sh") if path.stem != "shell")

each_walk = pytest.mark.parametrize("walk", SCRIPTS, ids=lambda path: path.stem)


def named(walk: Path, what: str) -> list[str]:
    """What the comment `# Pages: …` or `# Packages: …` of a walk names."""
    found = re.search(rf"^# {what}: (.+)$", walk.read_text(), re.MULTILINE)
    return found[1].split() if found else []


def commands(text: str) -> set[str]:
    """Every use of shardwise in a text as its command and options, without their values."""
    found = set()
    for line in text.replace("\\\n", " ").splitlines():
        for match in re.finditer(r"shardwise ([a-z-]+)([^`|>#&]*)", line):
            options = re.findall(r"(?<!\S)--?[a-z][a-z-]*", match[2])
            found.add(" ".join([match[1], *sorted(options)]))
    return found


@each_walk
def test_a_walk_needs_only_the_pages_it_names(walk: Path) -> None:
    pages = named(walk, "Pages")
    assert pages[0] == "README.md"
    shown = set().union(*(commands((ROOT / page).read_text()) for page in pages))
    walked = commands(re.sub(r"^#.*$", "", walk.read_text(), flags=re.MULTILINE))
    missing = {
        one for one in walked
        if not any(set(one.split()) <= set(other.split()) for other in shown)
    }  # fmt: skip
    assert not missing


@pytest.fixture(scope="session")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh environment with what `pip install "shardwise[hf]"` installs."""
    folder = tmp_path_factory.mktemp("newcomer") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    # The CPU build, as the tutorial advises without a GPU; versions as pinned for tests.
    subprocess.run([*pip, "torch==2.13.0"], check=True)
    pinned = ["--constraint", str(ROOT / ".ci" / "constraints.txt")]
    packages = sorted({package for walk in SCRIPTS for package in named(walk, "Packages")})
    subprocess.run([*pip, *pinned, f"{ROOT}[hf]", *packages], check=True)
    return folder / "bin"


@pytest.mark.nightly
@each_walk
def test_a_newcomer_gets_through(walk: Path, newcomer: Path, tmp_path: Path) -> None:
    data = [ROOT.parent / "shared" / name for name in named(walk, "Data")]
    if missing := [str(path) for path in data if not path.exists()]:
        pytest.skip(f"needs {', '.join(missing)}")
    pages = tmp_path / "pages"
    for page in named(walk, "Pages"):
        (pages / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / page, pages / page)
    folder = tmp_path / "folder"
    folder.mkdir()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SHARDWISE"))}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", str(walk)],
        cwd=folder,
        env={
            **kept,
            "PATH": f"{newcomer}{os.pathsep}{os.environ['PATH']}",
            "BASH_ENV": str(WALKS / "shell.sh"),
            "PAGES": str(pages),
            "WALKS": str(WALKS),
            "DATA": os.pathsep.join(map(str, data)),
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "80",
            "NO_COLOR": "1",
        },
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "Traceback" not in done.stdout + done.stderr
