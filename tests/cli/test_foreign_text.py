"""Names that others chose, on their way to a terminal, a spreadsheet or a browser."""

from __future__ import annotations

import csv
import io
import json
import unicodedata
from pathlib import Path

import msgspec
import pytest
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.report.page.markup import element
from shardwise.report.screen import plain_console
from shardwise.report.table import Column, csv_text
from shardwise.report.table import Table as Rows
from shardwise.runs.record import NAME
from tests.cli.test_runs import record
from tests.command import shardwise
from tests.observe.small import EVENTS, TRACE, event

# Sets the title of a terminal, turns red, reads backwards, ends the line, is no UTF-8.
OBEYED = "\x1b]0;owned\x07\x1b[31m\u202egnp.\u2066\x9b2J\u2028\udcff"
FORMULA = "=cmd|' /C calc'!A0"


def harmless(shown: str) -> bool:
    """Whether nothing in a text is obeyed by who shows it."""
    categories = {unicodedata.category(one) for one in set(shown) - {"\n", "\t"}}
    return not categories & {"Cc", "Cf", "Cs", "Zl", "Zp"}


@pytest.mark.parametrize("colours", [{"NO_COLOR": "1"}, {"FORCE_COLOR": "1", "TERM": "xterm"}])
def test_a_screen_shows_no_character_that_a_terminal_obeys(
    colours: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in colours.items():
        monkeypatch.setenv(name, value)
    table = Table(OBEYED)
    table.add_row(Text(OBEYED, style="red"))
    out = plain_console()
    for screen in (OBEYED, Text(f"a\n{OBEYED}"), table, Padding(table, 1)):
        out.print(screen)
    shown = capsys.readouterr().out
    # Rich's own colours begin with an escape: they are all that is left of them.
    assert ("\x1b[31m" in shown) is ("FORCE_COLOR" in colours)
    for own in ("\x1b[31m", "\x1b[1m", "\x1b[0m"):
        shown = shown.replace(own, "")
    assert harmless(shown)
    assert "owned" in shown


def test_a_spreadsheet_computes_no_cell() -> None:
    for name in (FORMULA, "+1", "-1", "@SUM(A1)", "\t=1", "a=1"):
        table = Rows([Column(name, name)])
        table.add(name)
        table.add(-1.5)
        head, cell, number = csv.reader(io.StringIO(csv_text(table)))
        assert head == cell
        assert not cell[0].strip().startswith(("=", "+", "-", "@"))
        assert number == ["-1.5"]


def test_a_page_shows_names_as_they_read() -> None:
    page = element("p", OBEYED, title=OBEYED)
    assert harmless(page)
    assert page.count("owned") == 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run and a trace whose names and contents mean harm."""
    folder = tmp_path_factory.mktemp("found")
    run = folder / "runs" / OBEYED
    run.mkdir(parents=True)
    told = msgspec.structs.replace(record(FORMULA), model=OBEYED[:-1])
    (run / NAME).write_bytes(msgspec.json.encode(told))
    broken = folder / "runs" / f"broken{OBEYED}"
    broken.mkdir()
    (broken / NAME).write_text("{")
    kernels = [event(OBEYED[:-1], 300.0, 400.0), *EVENTS]
    (folder / f"{OBEYED}.json").write_text(json.dumps({**TRACE, "traceEvents": kernels}))
    (folder / "other.json").write_text(json.dumps(TRACE))
    (folder / f"{OBEYED}.toml").write_text(f"{json.dumps(OBEYED[:-1])} = 1\n")
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ("runs", "runs", "--show", "model"),
        ("runs", "runs", "--csv"),
        ("runs", "runs", "--markdown"),
        ("trace", f"{OBEYED}.json", "--against", "other.json"),
        ("plan", f"{OBEYED}.toml"),
        ("estimate", f"missing{OBEYED}.toml"),
        ("fsck", f"runs/{OBEYED}"),
        ("memory", f"{OBEYED}.json"),
        ("import", f"{OBEYED}.json"),
    ],
    ids=lambda words: " ".join(words[:1]),
)
def test_no_command_prints_what_a_terminal_obeys(words: tuple[str, ...], folder: Path) -> None:
    done = shardwise(*words, folder=folder, PYTHONIOENCODING="utf-8:surrogateescape")
    assert "Traceback" not in done.stderr
    assert "owned" in done.stdout + done.stderr
    assert harmless(done.stdout + done.stderr)
    assert not any(line.startswith(("=", "+", "@")) for line in done.stdout.splitlines())


def test_no_report_holds_what_a_browser_obeys(folder: Path) -> None:
    done = shardwise("report", f"{OBEYED}.json", "-o", "page.html", folder=folder)
    assert done.returncode == 0, done.stderr
    page = (folder / "page.html").read_text()
    assert "owned" in page
    assert harmless(page)
    assert "\\u202e" not in page
