"""Hostile calls end in a sentence: no code runs, nothing is written outside, memory is bounded.

Each call is a fork of the process of the tests, in a folder of its own.
"""

from __future__ import annotations

import os
import resource
import signal
import tempfile
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.command import _run_in_child, environment
from tests.hostile.calls import CALLS, SAMPLE, Call
from tests.hostile.files import CANARY, write

MAX_BYTES = 1 << 30
CPU_SECONDS = 120


class Outcome(NamedTuple):
    code: int
    text: str
    peak_bytes: int


def run(call: Call, folder: Path) -> Outcome:
    """Run a call in `folder`, in a fork that may take so much processor time."""
    words = tuple(call.name if word == "FILE" else word for word in call.words)
    if call.kind is not None:
        write(call.kind, folder / call.name)
    import_module(f"shardwise.cli.{words[0]}{'_' * iskeyword(words[0])}")
    with tempfile.TemporaryFile() as stream:
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
            streams = (stream.fileno(), stream.fileno())
            _run_in_child(words, folder, environment(), 20 * CPU_SECONDS, streams)
        _, status, usage = os.wait4(child, 0)
        stream.seek(0)
        text = stream.read().decode("utf-8", "surrogateescape")
    return Outcome(os.waitstatus_to_exitcode(status), text, usage.ru_maxrss << 10)


def problems_of(call: Call, parent: Path) -> list[str]:
    """What a call did that it must not; `parent` is empty."""
    folder = parent / "inside"
    folder.mkdir()
    code, text, peak_bytes = run(call, folder)
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
def test_a_hostile_call_ends_in_a_sentence(call: Call, tmp_path: Path) -> None:
    assert problems_of(call, tmp_path) == []


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(8))
def test_all_hostile_calls_end_in_a_sentence(part: int, tmp_path: Path) -> None:
    assert len(CALLS) >= 400
    found = {}
    for number, call in enumerate(CALLS[part::8]):
        parent = tmp_path / str(number)
        parent.mkdir()
        problems = problems_of(call, parent)
        if problems:
            found[call.label] = problems
    assert found == {}
