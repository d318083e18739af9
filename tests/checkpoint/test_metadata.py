"""Metadata that torch wrote, and metadata that someone wrote to do harm."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.metadata import (  # noqa: E402
    _MEM_FORMAT_ENCODING,
    Metadata,
    TensorStorageMetadata,
)

from shardwise.checkpoint.foreign.metadata import read_metadata  # noqa: E402
from shardwise.checkpoint.format.paths import UntrustedError  # noqa: E402
from shardwise.checkpoint.verify.coverage import problems_of  # noqa: E402


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("dcp")
    state = {
        "weight": torch.ones(4, 3),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "scalar": torch.tensor(1),
        "empty": torch.ones(0, 2),
        "step": 7,
        "nested": {"name": "x", "list": [1, 2]},
    }
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    return (folder / ".metadata").read_bytes()


def test_it_says_what_torch_says(genuine: bytes) -> None:
    saved = read_metadata(genuine)
    theirs: Any = pickle.loads(genuine)
    tensors = {
        name: (str(entry.properties.dtype), tuple(entry.size))
        for name, entry in theirs.state_dict_metadata.items()
        if hasattr(entry, "chunks")
    }
    assert {t.name: (f"torch.{t.dtype}", t.shape) for t in saved.tensors.values()} == tensors
    places = {
        (index.fqn, tuple(index.offset or ()), info.relative_path, info.offset, info.length)
        for index, info in theirs.storage_data.items()
    }
    ours = [*saved.pieces, *saved.objects]
    assert {(p.tensor, p.offsets, p.file, p.start, p.length) for p in ours} == places
    assert {p.tensor for p in saved.objects} == set(theirs.state_dict_metadata) - set(tensors)
    assert list(problems_of(saved)) == []


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_that_torch_may_use(genuine: bytes, protocol: int) -> None:
    again = pickle.dumps(pickle.loads(genuine), protocol=protocol)
    assert read_metadata(again) == read_metadata(genuine)


@pytest.mark.parametrize("protocol", [2, 5])
def test_metadata_of_every_python_3_11(genuine: bytes, protocol: int) -> None:
    """Python 3.11.2 pickles the memory format as a call of getattr, 3.11.7 does not."""
    for named in (True, False):

        class Writer(pickle.Pickler):
            def reducer_override(self, value: Any, named: bool = named) -> Any:
                if not isinstance(value, _MEM_FORMAT_ENCODING):
                    return NotImplemented
                kind = type(value)
                return (getattr, (kind, value.name)) if named else (kind, (value.value,))

        file = io.BytesIO()
        Writer(file, protocol).dump(pickle.loads(genuine))
        assert (b"getattr" in file.getvalue()) == named
        assert read_metadata(file.getvalue()) == read_metadata(genuine)


def tensor_entry(metadata: Metadata, name: str) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def changed(genuine: bytes, change: Callable[[Metadata], object]) -> bytes:
    metadata: Metadata = pickle.loads(genuine)
    change(metadata)
    return pickle.dumps(metadata)


def test_a_chunk_that_is_in_no_file_leaves_a_hole(genuine: bytes) -> None:
    def drop(metadata: Metadata) -> None:
        for index in list(metadata.storage_data):
            if index.fqn == "weight":
                del metadata.storage_data[index]

    [(name, why)] = problems_of(read_metadata(changed(genuine, drop)))
    assert name == "weight"
    assert "12 of 12 elements are in no piece" in why


def test_a_piece_that_is_no_chunk_is_told(genuine: bytes) -> None:
    def drop(metadata: Metadata) -> None:
        tensor_entry(metadata, "weight").chunks.clear()

    with pytest.raises(UntrustedError, match="size for 'weight at"):
        read_metadata(changed(genuine, drop))
    with pytest.raises(UntrustedError, match="location for 'weight'"):
        read_metadata(changed(genuine, lambda m: m.state_dict_metadata.pop("weight")))


@pytest.mark.parametrize("value", [-1, 2**63, 2**2000, 1.5, "1", None, True, (1,)])
@pytest.mark.parametrize("field", ["offset", "length"])
def test_numbers_that_are_none(genuine: bytes, field: str, value: Any) -> None:
    def change(metadata: Metadata) -> None:
        setattr(next(iter(metadata.storage_data.values())), field, value)

    with pytest.raises(UntrustedError):
        read_metadata(changed(genuine, change))


class Evil:
    """Runs when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


FIELDS = ["state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"]


@pytest.mark.parametrize("where", ["whole", "key", *FIELDS])
def test_code_does_not_run_wherever_it_is(genuine: bytes, tmp_path: Path, where: str) -> None:
    mark = tmp_path / "ran"
    metadata: Metadata = pickle.loads(genuine)
    if where == "key":
        chunks: list[Any] = tensor_entry(metadata, "weight").chunks
        chunks[0] = Evil(mark)
    elif isinstance(getattr(metadata, where, None), dict):
        getattr(metadata, where)["weight"] = Evil(mark)
    elif where != "whole":
        setattr(metadata, where, Evil(mark))
    hostile = pickle.dumps(Evil(mark) if where == "whole" else metadata)
    with pytest.raises(UntrustedError, match="mkdir"):
        read_metadata(hostile)
    assert not mark.exists()
    # It would have, had torch read it.
    pickle.loads(hostile)
    assert mark.exists()


def known(name: str) -> bytes:
    return b"ctorch.distributed.checkpoint.metadata\n" + name.encode() + b"\n"


HOSTILE = {
    "nothing": b"",
    "text": b"no pickle at all",
    "cut": b"\x80\x04",
    "another object": pickle.dumps({"a": 1}),
    "long of two gigabytes": b"\x80\x04\x8b" + struct.pack("<i", 2**31 - 1) + b"\0.",
    "text of an exabyte": b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"x.",
    "bytes of an exabyte": b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b"x.",
    "frame of an exabyte": b"\x80\x04\x95" + struct.pack("<Q", 2**60) + b"N.",
    "memo of four billion": b"\x80\x02Nr" + struct.pack("<I", 2**32 - 1) + b".",
    "memo that is not there": b"\x80\x02j" + struct.pack("<I", 2**32 - 1) + b".",
    "deep lists": b"\x80\x04" + b"](" * 200_000 + b"e" * 200_000 + b".",
    "deep tuples": b"\x80\x04)" + b"\x85" * 1_000_000 + b".",
    "deep key": b"\x80\x04})" + b"\x85" * 1_000_000 + b"Ns.",
    "unhashable key": b"\x80\x04}]Ns.",
    "doubling lists": b"\x80\x04]\x94" + b"".join(
        b"](h" + bytes([n]) + b"h" + bytes([n]) + b"e\x94" for n in range(100)
    ) + b".",
    "empty stack": b"\x80\x04\x94.",
    "no mark": b"\x80\x04e.",
    "tuple of too few": b"\x80\x04N\x87.",
    "call of a text": b"\x80\x04\x8c\x01x)R.",
    "fields of a list": b"\x80\x04]}b.",
    "fields twice": b"\x80\x02" + known("Metadata") + b")\x81}b}b.",
    "metadata without fields": b"\x80\x02" + known("Metadata") + b")\x81.",
    "member that is not there": b"\x80\x02cbuiltins\ngetattr\n"
    + known("_MEM_FORMAT_ENCODING") + b"\x8c\x08__init__\x86R.",
    "member of another class": b"\x80\x02cbuiltins\ngetattr\n"
    + known("Metadata") + b"\x8c\x17TORCH_CONTIGUOUS_FORMAT\x86R.",
    "getattr itself": b"\x80\x02cbuiltins\ngetattr\n.",
    "persistent": b"\x80\x04\x8c\x01xQ.",
    "instance": b"\x80\x02(ios\nmkdir\n.",
    "extension": b"\x80\x02\x82\x01.",
    "no lines": b"\x80\x02cos",
    "no text": b"\x80\x04\x8c\x02\xff\xff.",
    "more behind it": pickle.dumps(1) + b"more",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_harm_ends_in_a_sentence(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(UntrustedError) as raised:
            read_metadata(HOSTILE[name])
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 300e6
    assert 5 < len(str(raised.value)) < 300
    assert "\n" not in str(raised.value)


def test_a_list_that_all_tensors_share_is_walked_once(genuine: bytes) -> None:
    """Few bytes that name 400 million chunks: walked each time, the test would not end."""
    metadata: Metadata = pickle.loads(genuine)
    entry = tensor_entry(metadata, "weight")
    entry.chunks *= 20_000
    metadata.state_dict_metadata.update({f"w{n}": entry for n in range(20_000)})
    with pytest.raises(UntrustedError):
        read_metadata(pickle.dumps(metadata))


def test_every_flipped_bit_ends_in_a_sentence_or_in_sense(genuine: bytes) -> None:
    refused = set()
    for at in {*range(0, len(genuine), 41), len(genuine) - 1}:
        flipped = bytearray(genuine)
        flipped[at] ^= 1 << (at % 8)
        try:
            list(problems_of(read_metadata(bytes(flipped))))
        except UntrustedError:
            refused.add(at)
    # A pickle is no pickle without its first and its last instruction.
    assert {0, len(genuine) - 1} <= refused
