"""Pickles that carry code: nothing runs, and the error names what was refused."""

from __future__ import annotations

import copyreg
import gzip
import os
import pickle
import pickletools
import resource
import struct
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from shardwise.observe import safe_pickle
from shardwise.observe.memory.unpickle import read_pickle
from shardwise.observe.safe_pickle import Name, Record, UnsafePickleError, load_pickle
from shardwise.spec.record import SpecError
from tests.forks import Forks
from tests.observe.memory.build import block, event, segment, snapshot

DATA = snapshot([segment([block(1, 4)])], [event("alloc", 1, 4)], pool=(0, 0), x=[1.5, None, True])


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks(__name__) as small:
        yield small


class Evil:
    """Writes a file when it is unpickled the usual way."""

    def __init__(self, path: Path) -> None:
        self.command = f"touch {path}"

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


class Stateful:
    """Made without a call, then given a state."""

    def __getstate__(self) -> dict[str, int]:
        return {"a": 1}


def text(word: str) -> bytes:
    return b"\x8c" + bytes([len(word)]) + word.encode()


def command(mark: Path) -> bytes:
    return text(f"touch {mark}")


def refused(data: bytes) -> UnsafePickleError:
    with pytest.raises(UnsafePickleError) as caught:
        load_pickle(data)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_is_read_as_it_is(protocol: int, tmp_path: Path) -> None:
    written = pickle.dumps(DATA, protocol=protocol)
    assert load_pickle(written) == DATA
    (tmp_path / "packed").write_bytes(gzip.compress(written))
    assert read_pickle(tmp_path / "packed") == DATA


def test_numbers_of_every_width_and_tuples_of_them() -> None:
    numbers = [0, 255, 256, 65535, 65536, -1, 1 << 31, 1 << 47, (1 << 60) + 7, -(1 << 40)]
    found = [*numbers, (1,), (1, 1 << 40), (1, 2, 3), (), 5, (0, 7)]
    assert load_pickle(pickle.dumps(found)) == found
    many = [{"text": str(n)} for n in range(70_000)]
    assert load_pickle(pickle.dumps(many, protocol=2)) == many


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("nested", [False, True])
def test_a_call_never_runs(protocol: int, nested: bool, tmp_path: Path) -> None:
    evil = Evil(tmp_path / "ran")
    data = {**DATA, "segments": [*DATA["segments"], {"blocks": [evil]}]} if nested else evil
    assert refused(pickle.dumps(data, protocol=protocol)).reference == "posix.system"
    assert not (tmp_path / "ran").exists()


def test_every_instruction_that_runs_code_is_refused(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    shell = command(mark)
    imports = {
        "GLOBAL": b"\x80\x02cposix\nsystem\n(" + shell + b"tR.",
        "STACK_GLOBAL": b"\x80\x04" + text("posix") + text("system") + b"\x93" + shell + b"\x85R.",
    }
    instructions = {
        "INST": b"\x80\x02(" + shell + b"iposix\nsystem\n.",
        "OBJ": b"\x80\x02(K\x01o.",
        "REDUCE": b"\x80\x02K\x01)R.",
        "NEWOBJ": b"\x80\x02K\x01)\x81.",
        "NEWOBJ_EX": b"\x80\x04K\x01)}\x92.",
        "BUILD": b"\x80\x02}}b.",
        "EXT1": b"\x80\x02\x82\x01.",
        "EXT2": b"\x80\x02\x83\x01\x00.",
        "EXT4": b"\x80\x02\x84\x01\x00\x00\x00.",
        "BINPERSID": b"\x80\x02" + shell + b"Q.",
        "PERSID": b"\x80\x02Pit\n.",
        "NEXT_BUFFER": b"\x80\x05\x97.",
    }
    copyreg.add_extension("posix", "system", 1)
    try:
        for name, data in {**imports, **instructions}.items():
            error = refused(data)
            if name in (*imports, "INST"):
                assert error.reference == "posix.system"
            # The same inside a snapshot that is otherwise good.
            good = pickle.dumps(DATA, protocol=2)
            refused(good[:-1] + b"(" + data.lstrip(b"\x80")[1:-1] + good[-1:])
    finally:
        copyreg.remove_extension("posix", "system", 1)
    assert not mark.exists()


@pytest.mark.parametrize("value", [OrderedDict(), Stateful(), 1j, print, Path("x")])
def test_whatever_is_not_plain_is_refused(value: object) -> None:
    error = refused(pickle.dumps({**DATA, "extra": value}))
    assert error.reference


def test_allowed_names_become_records_and_are_never_imported(tmp_path: Path) -> None:
    evil = Evil(tmp_path / "ran")
    found = load_pickle(pickle.dumps([evil, Stateful()]), lambda module, name: True)
    called, made = found
    assert isinstance(called, Record)
    assert isinstance(made, Record)
    assert (called.kind, called.arguments) == (Name("posix", "system"), (evil.command,))
    assert made.kind.name == "Stateful"
    assert made.field("a") == 1
    assert made.field("b") is None
    assert not (tmp_path / "ran").exists()


OURS = "tests.test_safe_pickle"


class Layout(Enum):
    """An enumeration whose first member a pickle may name."""

    ROWS = 1
    COLUMNS = 2


def load_rows(data: bytes) -> Any:
    """Read a pickle that may name this file's enumeration, and one member of it through getattr."""
    is_allowed = {(OURS, "Layout"), (OURS, "Stateful")}.__contains__
    return load_pickle(data, lambda *name: is_allowed(name), {(OURS, "Layout"): {"ROWS"}})


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_member_of_an_enumeration_is_read_in_both_forms(protocol: int) -> None:
    """By getattr, as Python 3.11.2 pickles it, and by its value, as others do."""

    class Member:
        def __init__(self, *reduced: Any) -> None:
            self.reduced = reduced

        def __reduce__(self) -> Any:
            return self.reduced

    for how, argument in (((getattr, (Layout, "ROWS")), "ROWS"), ((Layout, (1,)), 1)):
        data = pickle.dumps([Member(*how)], protocol=protocol)
        assert pickle.loads(data) == [Layout.ROWS]
        (found,) = load_rows(data)
        assert (found.kind, found.arguments) == (Name(OURS, "Layout"), (argument,))


GETATTR = b"cbuiltins\ngetattr\n"
LAYOUT = b"c" + OURS.encode() + b"\nLayout\n"
STATEFUL = b"c" + OURS.encode() + b"\nStateful\n"


@pytest.mark.parametrize(
    "call",
    [
        GETATTR + LAYOUT + text("COLUMNS") + b"\x86R",
        GETATTR + LAYOUT + text("__init__") + b"\x86R",
        GETATTR + STATEFUL + text("ROWS") + b"\x86R",
        GETATTR + STATEFUL + b")\x81" + text("ROWS") + b"\x86R",
        GETATTR + LAYOUT + b"K\x01\x85R" + text("ROWS") + b"\x86R",
        GETATTR + GETATTR + text("__self__") + b"\x86R",
        GETATTR + LAYOUT + text("ROWS") + b"N\x87R",
        GETATTR + LAYOUT + b"\x85R",
        GETATTR + LAYOUT + b"K\x01\x86R",
        b"(" + GETATTR + LAYOUT + text("__class__") + b"o",
        b"(" + LAYOUT + text("__class__") + b"ibuiltins\ngetattr\n",
        # A state for the function itself: it must not lose its check to one of two fields.
        GETATTR + b"N}" + text("__new__") + STATEFUL + b"s\x86b",
        LAYOUT + b"N}" + text("kind") + b"K\x01s\x86b",
        b"cbuiltins\nsetattr\n" + LAYOUT + text("ROWS") + b"K\x01\x87R",
    ],
)
def test_getattr_gives_nothing_but_allowed_members(call: bytes) -> None:
    with pytest.raises(UnsafePickleError):
        load_rows(b"\x80\x04" + call + b".")


def test_without_members_there_is_no_getattr() -> None:
    call = GETATTR + LAYOUT + text("ROWS") + b"\x86R"
    assert load_rows(b"\x80\x04" + call + b".").arguments == ("ROWS",)
    assert refused(b"\x80\x04" + call + b".").reference == "builtins.getattr"


@pytest.mark.parametrize(
    "data",
    [
        # A memo of four billion; a frame, a text, a number and bytes longer than the file.
        b"\x80\x02]r\xff\xff\xff\xff.",
        b"\x80\x02]r\xff\xff\xff\x7f.",
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"].",
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x.",
        b"\x80\x02\x8b" + struct.pack("<i", 1 << 30) + b"x.",
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
        # Ten million sets of 200 bytes each, of a byte each.
        b"\x80\x04](" + b"\x8f" * 10_000_000 + b"e.",
        # A key of nested tuples overflows the stack; as a value, a reader may make it one.
        b"\x80\x02})" + b"\x85" * 1_000_000 + b"K\x01s.",
        b"\x80\x02)" + b"\x85" * 1_000_000 + b".",
        # Sixty tuples that hold the one before twice: to hash the last takes 2^60 steps.
        b"\x80\x02)" + b"2\x86" * 60 + b".",
    ],
    ids=["memo", "memo-2", "frame", "text", "number", "bytes", "bytearray", "sets", "nested-key",
         "nested", "doubled"],
)  # fmt: skip
def test_what_would_take_all_memory_or_crash_is_refused(
    data: bytes, tmp_path: Path, forks: Forks
) -> None:
    path = tmp_path / "data"
    path.write_bytes(data)
    ended = forks.call(f"{__name__}:print_growth_of_refusal", str(path), folder=tmp_path)
    assert ended.code == 0, ended.text
    # Only the child of the one that reads may need much of it.
    assert int(ended.text) < 64 << 10
    assert ended.peak_bytes < 1 << 30


def print_growth_of_refusal(path: str) -> None:
    """Refuse a file, and print by how many KiB the most memory of this process has grown."""
    data = Path(path).read_bytes()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(data)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02})" + b"2\x86" * 60 + b"K\x01s.",
        # Numbers of one hash: a dict of them is searched from end to end.
        b"\x80\x02}("
        + b"".join(pickle.dumps(n * (2**61 - 1), 2)[2:-1] + b"N" for n in range(1, 100_000))
        + b"u.",
    ],
    ids=["doubled-key", "colliding-keys"],
)
def test_what_would_never_end_is_refused(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.observe.safe_pickle.LEAST_SECONDS", 1)
    refused(data)


def test_a_lower_limit_of_whoever_started_it_lifts_none() -> None:
    """A hard limit of processor time below the child's own must not cost the limit of memory."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (9, 9))\n"
        "from shardwise.observe.safe_pickle import load_pickle\n"
        "load_pickle(b'\\x80\\x04](' + b'\\x8f' * 10_000_000 + b'e.')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "needs more than 768 MiB" in done.stderr


def test_files_are_read_by_size_where_memory_cannot_be_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on Windows: no module `resource`."""
    python = ["-c", "import sys; sys.stdin.buffer.read(); sys.exit(13)"]
    monkeypatch.setattr("shardwise.observe.safe_pickle._child_arguments", lambda *_: python)
    assert load_pickle(pickle.dumps(DATA)) == DATA
    monkeypatch.setattr("shardwise.observe.safe_pickle.UNLIMITED_BYTES", 10)
    assert "cannot limit" in str(refused(pickle.dumps(DATA)))


def test_deep_lists_and_marks_are_read_or_refused_but_end() -> None:
    deep: Any = load_pickle(b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".")
    assert isinstance(deep, list)
    refused(b"\x80\x02" + b"(" * 200_000 + b".")


# Counts the calls of a Python that runs a file as its own, and writes their number when it ends.
COUNTING = """
import os, runpy, sys, threading
calls, leave = [0], os._exit
def count(frame, event, argument):
    calls[0] += 1
def write_and_leave(code):
    threading.setprofile(None)
    open({counted!r}, "w").write(str(calls[0]))
    leave(code)
os._exit = write_and_leave
threading.setprofile(count)
runpy.run_path({file!r}, run_name="__main__")
"""


def test_reading_does_not_call_python_for_each_instruction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader written in Python makes several calls for every instruction, of a few bytes each.

    Counted, because seconds depend on the machine: in this process, and in the child that tries
    the file first.
    """
    events = [event("alloc", number << 9, 512) for number in range(5_000)]
    data = pickle.dumps(snapshot([segment([block(1, 4)])], events))
    instructions = sum(1 for _ in pickletools.genops(data))
    counted = tmp_path / "counted"
    code = COUNTING.format(counted=str(counted), file=safe_pickle.__file__)
    limits = ["20000000000", "600"]
    monkeypatch.setattr(
        safe_pickle, "_child_arguments", lambda *_: ["-I", "-S", "-c", code, *limits]
    )
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        found = load_pickle(data)
    finally:
        sys.setprofile(None)
    assert found == pickle.loads(data)
    for made in (calls, int(counted.read_text())):
        assert 0 < made < instructions / 20


@pytest.mark.parametrize("protocol", [2, 4])
def test_every_beginning_of_a_file_is_a_sentence(protocol: int) -> None:
    whole = pickle.dumps(DATA, protocol=protocol)
    for length in range(0, len(whole), 53):
        refused(whole[:length])


@pytest.mark.parametrize(
    "data",
    [b"", b"hello", b"\x00", b"PK\x03\x04zip", b"\x7fELF", b"\x80\xff.", b".", b"\x80\x04.", b"a.",
     b"\x80\x02u.", b"\x80\x02h\x07."],
)  # fmt: skip
def test_what_is_no_pickle_is_a_sentence(data: bytes) -> None:
    refused(data)


def test_a_file_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.observe.memory.read_file.MAX_BYTES", 1 << 20)
    path = tmp_path / "bomb"
    path.write_bytes(gzip.compress(b"\x80\x04" + b"]" * (1 << 22)))
    with pytest.raises(SpecError, match="is larger than"):
        read_pickle(path)


def test_a_file_that_is_refused_is_one_printable_sentence(tmp_path: Path) -> None:
    path = tmp_path / "it.pickle"
    path.write_bytes(b"\x80\x04" + text("posix\x1b[2J") + text("system\n") + b"\x93.")
    with pytest.raises(SpecError) as caught:
        read_pickle(path)
    (sentence,) = caught.value.problems
    assert sentence.isprintable()
    assert str(path) in sentence
