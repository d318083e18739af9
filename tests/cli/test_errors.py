"""How errors reach a shell: sentences and exit codes, and tracebacks for those who ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.cli.main import is_bad_input, sentences
from shardwise.spec.record import SpecError
from tests.cli.test_foreign_text import OBEYED, harmless
from tests.command import shardwise

BAD = ("plan", "--model", "no-such-model", "--cluster", "8xH100-SXM")


def test_bad_input_is_a_sentence_without_a_traceback() -> None:
    done = shardwise(*BAD)
    assert done.returncode == 2
    assert "no-such-model" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [("--debug", *BAD), (*BAD, "--debug")])
def test_debug_shows_the_traceback_wherever_it_stands(words: tuple[str, ...]) -> None:
    done = shardwise(*words)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "no-such-model" in done.stderr


def test_the_environment_asks_for_tracebacks_too() -> None:
    assert "Traceback" in shardwise(*BAD, SHARDWISE_DEBUG="1").stderr
    assert "Traceback" not in shardwise(*BAD, SHARDWISE_DEBUG="0").stderr


def test_a_traceback_shows_no_character_that_a_terminal_obeys() -> None:
    done = shardwise("estimate", f"{OBEYED[:-1]}.toml", SHARDWISE_DEBUG="1")
    assert "Traceback" in done.stderr
    assert "owned" in done.stderr
    assert harmless(done.stderr)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    # A name that is too long: refused by the system for every user, root too.
    target = tmp_path / ("x" * 300 + ".toml")
    done = shardwise("plan", "--model", "gpt2", "--cluster", "8xH100-SXM", "-o", str(target))
    assert done.returncode == 2
    assert target.name in done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")


@pytest.mark.parametrize(
    ("error", "bad_input", "told"),
    [
        (SpecError(["one", "two"]), True, ["one", "two"]),
        (FileNotFoundError(2, "No such file or directory", "a.toml"), True, ["a.toml"]),
        (PermissionError(13, "Permission denied", "b.toml"), True, ["b.toml"]),
        (IsADirectoryError(21, "Is a directory", "c.toml"), True, ["c.toml"]),
        (NotADirectoryError(20, "Not a directory", "d.toml"), True, ["d.toml"]),
        # May pass, although a file has a name: a rank that meets it is started again.
        (OSError(5, "Input/output error", "e.bin"), False, ["e.bin"]),
        (OSError(116, "Stale file handle", "f.bin"), False, ["f.bin"]),
        (OSError(24, "Too many open files", "g.bin"), False, ["g.bin"]),
        (OSError(28, "No space left on device", "h.bin"), False, ["h.bin"]),
        # No file of the user's: a full socket, a lost connection, a bug.
        (ConnectionResetError(104, "Connection reset by peer"), False, ["--debug"]),
        (OSError(24, "Too many open files"), False, ["--debug"]),
        (ZeroDivisionError("division\nby zero"), False, ["division by zero"]),
        (RuntimeError("x" * 10_000), False, ["RuntimeError"]),
    ],
)
def test_who_can_mend_an_error(error: Exception, bad_input: bool, told: list[str]) -> None:
    assert is_bad_input(error) == bad_input
    found = sentences(error)
    assert len(found) == len(told)
    for sentence, part in zip(found, told, strict=True):
        assert part in sentence
        assert "\n" not in sentence
        assert len(sentence) < 500
