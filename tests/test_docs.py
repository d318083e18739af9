"""README and documentation: every shardwise command in them runs, and prints what they show."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shardwise.spec.run import run_from_dict

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str]]:
    return [(match[1], match[2]) for match in BLOCK.finditer(page.read_text())]


def commands() -> list[tuple[str, str, str | None, str | None]]:
    """(page, command, the output shown after it, the run.toml shown before it)."""
    found = []
    for page in PAGES:
        parts = blocks(page)
        run = None
        for index, (kind, text) in enumerate(parts):
            run = text if kind == "toml" and "[job]" in text else run
            lines = [line for line in text.splitlines() if line.startswith("shardwise ")]
            if kind != "sh" or not lines:
                continue
            following = parts[index + 1] if index + 1 < len(parts) else ("", "")
            # A text that begins with a prompt shows another command.
            output = following[0] == "text" and not following[1].startswith("$ ")
            for line in lines:
                shown = following[1] if output and line == lines[-1] else None
                found.append((page.name, line, shown, run))
    return found


def test_there_are_commands_to_check() -> None:
    assert len(commands()) >= 4


def without_numbers(line: str) -> str:
    """What a line says when timings and losses are left out; columns keep their order."""
    return " ".join(re.sub(r"[-+]?\d[\d.,-]*%?|exact", "#", line).split())


@pytest.mark.parametrize(
    ("page", "command", "shown", "run"), commands(), ids=lambda value: str(value)[:60]
)
def test_a_command_runs_and_prints_what_is_shown(
    page: str, command: str, shown: str | None, run: str | None, tmp_path: Path
) -> None:
    of_a_run = command.split()[1] in ("fsck", "export-weights")
    trains = of_a_run or command.split()[1] in ("train", "doctor", "profile")
    if trains:
        pytest.importorskip("transformers")
        run = run or next(text for kind, text in blocks(ROOT / "README.md") if kind == "toml")
        (tmp_path / "run.toml").write_text(run)
        # Where a page speaks of eight processes, two show the same here.
        command = re.sub(r"--nproc \d+", "--nproc 2", command)
        if shown is None and command.split()[1] == "train":
            command += " --steps 10"  # nobody looks at how far it comes
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    if of_a_run:
        words = ["shardwise", "train", "run.toml", "--name", "it", "--steps", "5"]
        subprocess.run([sys.executable, "-m", *words], env=environment, cwd=tmp_path, check=True)
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    if shown is not None:
        printed = [line.rstrip() for line in done.stdout.strip().splitlines()]
        expected = [line.rstrip() for line in shown.strip().splitlines()]
        if trains:
            printed = [without_numbers(line) for line in printed]
            expected = [without_numbers(line) for line in expected]
        assert printed == expected


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_run_files_shown_are_valid(page: Path) -> None:
    for kind, text in blocks(page):
        if kind == "toml" and "[job]" in text:
            assert run_from_dict(tomllib.loads(text)).resolved().strategy.shard


def test_python_in_the_readme_runs() -> None:
    assert any("import shardwise" in text for _, text in blocks(ROOT / "README.md"))
    for kind, text in blocks(ROOT / "README.md"):
        if kind == "python" and "import shardwise" in text:
            done = subprocess.run(
                [sys.executable, "-c", text], capture_output=True, text=True, check=True
            )
            assert done.stdout.startswith("fits")
