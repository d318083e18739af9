"""Hostile calls end in a sentence: no code runs, nothing is written outside, memory is bounded.

Each call is a fork of a small process, in a folder of its own.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.cli.main import COMMANDS
from tests.command import PATIENCE_S
from tests.forks import Forks
from tests.hostile.calls import CALLS, SAMPLE, SERVES_S, Call
from tests.hostile.files import CANARY, write

MAX_BYTES = 1 << 30
# What most calls import.
COMMON = ("shardwise.cli.main", "shardwise.spec.run", "shardwise.report.screen")
NEED_TORCH = ("train", "doctor", "profile", "compare", "tune", "calibrate", "accept",
              "export-weights")  # fmt: skip


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks(*COMMON) as small:
        yield small


@pytest.fixture(scope="module")
def forks_with_torch() -> Iterator[Forks]:
    pytest.importorskip("torch")
    with Forks(*COMMON, "torch", "shardwise.launch.launcher") as small:
        yield small


def problems_of(call: Call, parent: Path, forks: Forks) -> list[str]:
    """What a call did that it must not; `parent` is empty."""
    folder = parent / "inside"
    folder.mkdir()
    if call.kind is not None:
        write(call.kind, folder / call.name)
    named = {"FILE": call.name}
    words = [named.get(word, word) for word in call.words]
    variables = {name: named.get(value, value) for name, value in call.variables}
    seconds = SERVES_S if call.serves else PATIENCE_S
    code, text, peak_bytes = forks.command(*words, folder=folder, seconds=seconds, **variables)
    outside = sorted(path.name for path in parent.iterdir() if path != folder)
    found = {
        f"ran the file's code: {CANARY}": CANARY in outside,
        f"wrote outside of its folder: {outside}": bool(outside),
        f"ended by {signal.Signals(-code).name if code < 0 else code}": code not in (0, 1, 2),
        "a traceback": "Traceback" in text,
        f"an unexpected error: {text[-200:]}": "nexpected error" in text,
        "no sentence": code == 2 and not text.strip(),
        "terminal escapes or bidi characters": any(c in text for c in "\x1b\x07\u202e"),
        f"{peak_bytes >> 20} MiB": peak_bytes > MAX_BYTES,
    }
    return [problem for problem, is_so in found.items() if is_so]


@pytest.mark.parametrize("call", SAMPLE, ids=lambda call: call.label)
def test_a_hostile_call_ends_in_a_sentence(call: Call, tmp_path: Path, forks: Forks) -> None:
    assert problems_of(call, tmp_path, forks) == []


def test_hostile_calls_are_of_every_command() -> None:
    assert len(CALLS) >= 400
    assert {call.words[0] for call in CALLS} == {*COMMANDS}


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(16))
def test_all_hostile_calls_end_in_a_sentence(
    part: int, tmp_path: Path, forks: Forks, forks_with_torch: Forks
) -> None:
    found = {}
    for number, call in enumerate(CALLS[part::16]):
        parent = tmp_path / str(number)
        parent.mkdir()
        chosen = forks_with_torch if call.words[0] in NEED_TORCH else forks
        problems = problems_of(call, parent, chosen)
        if problems:
            found[call.label] = problems
    assert found == {}
