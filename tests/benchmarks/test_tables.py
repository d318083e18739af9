"""Tables of measured runs: what is shipped holds the figures of what it was made from."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.validation import FOLDER
from tests.command import ROOT, environment

# Longer texts would be sentences of others; names of systems, sources and settings are shorter.
LONGEST_TEXT = 120
# Addresses, and lists of network cards as submitted.
LONGER = {"url_or_path", "network"}


def digest(rows: tables.Rows) -> str:
    """Of all cells in order: rows that are held out stay out of what a failing test prints."""
    text = "\n".join("\t".join(row.values()) for row in rows)
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("name", tables.COLUMNS)
def test_the_figures_are_those_of_the_tables_beside_the_project(shared: Path, name: str) -> None:
    beside = tables.read(shared / "validation", name)
    shipped = tables.read(FOLDER, name)
    assert tuple(shipped[0]) == tables.COLUMNS[name]
    assert len(shipped) == len(beside)
    assert digest(shipped) == digest(tables.shipped(shared / "validation", name))


def test_every_file_is_one_that_the_command_writes() -> None:
    files = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.is_file()}
    written = {f"{name}.csv" for name in (*tables.COLUMNS, tables.SOURCES)}
    others = {"evidence.csv", "expert_settings.csv", "kernel_points.csv"}
    assert files == written | others | {"README.md"}
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in written | others)


def test_no_cell_is_a_text_of_others() -> None:
    for name in (*tables.COLUMNS, tables.SOURCES):
        for row in tables.read(FOLDER, name):
            cells = [text for column, text in row.items() if column not in LONGER]
            assert max(map(len, cells)) <= LONGEST_TEXT, name


def test_every_source_has_an_address() -> None:
    known = {row["source"] for row in tables.read(FOLDER, tables.SOURCES) if row["url_or_path"]}
    for name, columns in tables.COLUMNS.items():
        if "source" in columns and "url_or_path" not in columns and name in ADDRESSED:
            assert {row["source"] for row in tables.read(FOLDER, name)} <= known, name


# The other tables come from one source each, which the README names.
ADDRESSED = {
    name for name in tables.COLUMNS if name not in ("did_not_fit", "collective_bandwidth_h100")
}


@pytest.mark.nightly
def test_the_command_of_the_page_runs_on_a_clean_clone(tmp_path: Path) -> None:
    """Nothing lies beside the clone; what it prints is the head of the page that is committed."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    done = subprocess.run(
        [sys.executable, "benchmarks/accuracy.py"],
        capture_output=True, text=True, cwd=clone, check=False,
        env=environment() | {"PYTHONPATH": str(clone / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    assert done.stdout.partition("## Adapters")[0] == page.partition("## Adapters")[0]
