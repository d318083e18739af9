"""Layout, table and index of ranks: what is written is read, and nothing else is believed."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.format.checksum import BLOCK
from shardwise.checkpoint.format.folder import LocalFolder, find_folder
from shardwise.checkpoint.format.layout import (
    Layout,
    ListedTensor,
    assign_writers,
    read_layout,
    write_layout,
)
from shardwise.checkpoint.format.manifest import FileRecord, read_manifest, write_manifest
from shardwise.checkpoint.format.paths import UntrustedError
from shardwise.checkpoint.format.pieces import Tensor
from shardwise.checkpoint.format.rank_index import read_rank_index, write_rank_index
from shardwise.checkpoint.format.rank_table import RankRecord, RankTable, pack_record, write_table
from shardwise.checkpoint.format.sharding import Axis, Box
from shardwise.checkpoint.verify.fsck import verify_checkpoint
from shardwise.checkpoint.verify.opened import open_checkpoint
from tests.checkpoint.ours import named, named_table, write_ours
from tests.checkpoint.test_fsck import ARRAYS
from tests.examples import examples

HALVES = (Axis(0, 2, 1),)
# Two blocks and a row, in two shards of which each has two.
LARGE = Tensor("large", "float32", (2 * BLOCK // 1024 + 2, 256))
SMALL = Tensor("small", "uint8", (3,))
ODD = ListedTensor(Tensor("odd", "int64", (4,)), ((1, Box((0,), (1,))), (0, Box((1,), (3,)))))
OWN = Tensor("rank.1.mark", "float64", (2,))
LAYOUT = Layout(assign_writers([(LARGE, HALVES), (SMALL, ())], 2), [ODD])


def test_a_layout_is_read_as_written() -> None:
    found = read_layout(write_layout(LAYOUT), 2)
    assert found.ruled == LAYOUT.ruled
    assert found.listed == LAYOUT.listed
    assert list(found.tensors) == ["large", "small", "odd"]


def test_pieces_follow_from_the_layout() -> None:
    """Rank 1 has its own mark and one of the odd, then half of the large: four checksums."""
    half = (2 * BLOCK // 1024 + 2) // 2
    size = 100 + 8 + 16 + half * 1024
    index = write_rank_index([OWN], [1, 2, 3, 4])
    own, pieces = read_rank_index(index, 1, RankRecord(size, 100, 0, 0, 0), LAYOUT)
    assert own == [OWN]
    assert [(p.tensor, p.offsets, p.start, p.length, p.crc32) for p in pieces] == [
        ("odd", (0,), 100, 8, (1,)),
        ("rank.1.mark", (0,), 108, 16, (2,)),
        ("large", (half, 0), 124, half * 1024, (3, 4)),
    ]
    assert {piece.file for piece in pieces} == {"rank-00001.safetensors"}


@pytest.mark.parametrize(
    ("own", "checksums", "size", "why"),
    [
        ([OWN], [1, 2, 3], 0, "lacks checksums of 'large'"),
        ([OWN], [1, 2, 3, 4, 5], 0, "1 checksums too many"),
        ([OWN], [1, 2, 3, 4], 1, "that end at byte"),
        ([], [1, 2, 3, 4], 0, "that end at byte"),
        ([OWN, OWN], [1, 2, 3, 4], 16, "twice"),
        ([OWN._replace(dtype="object")], [1, 2, 3, 4], 0, "unknown dtype"),
        ([OWN._replace(name="small")], [1, 2, 3, 4], 0, "layout has too"),
    ],
)
def test_an_index_that_does_not_fill_its_file(
    own: list[Tensor], checksums: list[int], size: int, why: str
) -> None:
    size += 100 + 8 + 16 + (BLOCK // 1024 + 1) * 1024
    data = write_rank_index(own, checksums)
    with pytest.raises(UntrustedError, match=why):
        read_rank_index(data, 1, RankRecord(size, 100, 0, 0, 0), LAYOUT)


def test_a_table_is_24_bytes_per_rank_and_read_in_groups(tmp_path: Path) -> None:
    first, last = RankRecord(2**40, 2, 3, 4, 2**32 - 1), RankRecord(7, 6, 5, 4, 3)
    rows = [first, *[RankRecord()] * (2 * 1024 - 1), last]
    data, listed = write_table(b"".join(pack_record(one) for one in rows))
    # Three groups: two of 1,024 ranks, and one of a single rank.
    assert (len(data), listed.bytes, listed.head) == (3 * 4 + 2049 * 24, len(data), 12)
    file = tmp_path / "ranks.bin"
    # A broken row in the second group.
    file.write_bytes(data[:-100] + b"?" + data[-99:])
    table = RankTable(LocalFolder(tmp_path), listed, 2049)
    assert (table[0], table[2048]) == (first, last)
    with pytest.raises(UntrustedError, match=r"ranks.bin \(ranks 1,024 to 2,047\) has checksum"):
        table[1500]
    file.write_bytes(b"?" + data[1:])
    with pytest.raises(UntrustedError, match="ranks.bin has checksum"):
        RankTable(LocalFolder(tmp_path), listed, 2049)
    with pytest.raises(UntrustedError, match="ranks.bin has 49,188 bytes, expected 49,212"):
        RankTable(LocalFolder(tmp_path), listed, 2050)
    file.write_bytes(data[:-1])
    with pytest.raises(UntrustedError, match="ranks.bin has 49,187 bytes, expected 49,188"):
        RankTable(LocalFolder(tmp_path), listed, 2049)
    file.unlink()
    with pytest.raises(UntrustedError, match="ranks.bin is missing"):
        RankTable(LocalFolder(tmp_path), listed, 2049)


LIES: dict[str, tuple[dict[str, Any], str]] = {
    "rule": ({"tensors": [["a", "int8", [4], 7, 0]]}, "unknown rule"),
    "replica": ({"tensors": [["a", "int8", [4], 0, 2]]}, "unknown replica"),
    "negative": ({"tensors": [["a", "int8", [-4], 0, 0]]}, "not a valid layout"),
    "huge": ({"tensors": [["a", "int8", [2**62], 0, 0]]}, "not a valid layout"),
    "dtype": ({"tensors": [["a", "pickle", [4], 0, 0]]}, "unknown dtype"),
    "twice": ({"tensors": [["a", "int8", [4], 0, 0]] * 2}, "twice"),
    "listed too": (
        {"tensors": [["a", "int8", [4], 0, 0]], "listed": [["a", "int8", [4], []]]},
        "twice",
    ),
    "stranger": ({"listed": [["a", "int8", [4], [[2, [0], [4]]]]]}, "unknown rank"),
    "axes": ({"axes": [[[0, 4, 1]]], "tensors": [["a", "int8", [4], 0, 0]]}, "cannot form"),
    "no axes": ({"axes": [[[0, 2, 0]]], "tensors": [["a", "int8", [4], 0, 0]]}, "overlap"),
    "no ranks": ({"axes": [[[0, 0, 1]]], "tensors": [["a", "int8", [4], 0, 0]]}, "overlap"),
    "block": ({"block": 1}, "blocks of 1 bytes"),
    "more": ({"code": "import os"}, "not a valid layout"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_layout_that_lies_is_refused(lie: str) -> None:
    changes, why = LIES[lie]
    table = {"block": BLOCK, "axes": [[]], "tensors": [], "listed": [], **changes}
    with pytest.raises(UntrustedError, match=why):
        read_layout(json.dumps(table).encode(), 2)


def list_in_manifest(folder: Path, record: FileRecord) -> None:
    """Make the manifest agree with another layout or table."""
    file = folder / "manifest.json"
    manifest = read_manifest(file.read_bytes())
    files = tuple(one for one in manifest.files if one.name != record.name)
    file.write_bytes(write_manifest(manifest.but(files=(*files, record))))


def replace_layout(folder: Path, data: bytes) -> None:
    list_in_manifest(folder, named(folder / "layout.json", data))


def replace_rows(folder: Path, rows: bytes) -> None:
    list_in_manifest(folder, named_table(folder, rows))


def refused(folder: Path) -> str:
    """What opening says; fsck must find it too."""
    assert not verify_checkpoint(find_folder(str(folder))).intact
    with pytest.raises(UntrustedError) as error:
        open_checkpoint(LocalFolder(folder))
    return str(error.value)


def test_a_checkpoint_that_lies_consistently(tmp_path: Path) -> None:
    """Checksums match everywhere, and the parts still do not make a whole."""
    folder = tmp_path / "it"
    write_ours(folder, ARRAYS)
    layout, rows = (folder / "layout.json").read_bytes(), (folder / "ranks.bin").read_bytes()[4:]
    told = json.loads(layout)
    scale = next(entry for entry in told["tensors"] if entry[0] == "scale")
    # Another rank would have written it.
    scale[4] = 1
    replace_layout(folder, json.dumps(told).encode())
    assert "rank-00000.index has tensors that end at byte" in refused(folder)
    told["tensors"].remove(scale)
    told["listed"] = [["scale", "float32", [2], [[0, [0], [1]]]]]
    replace_layout(folder, json.dumps(told).encode())
    assert "scale: 1 of 2 elements are in no piece" in refused(folder)
    replace_layout(folder, layout)
    replace_rows(folder, rows[:24] + bytes(24))
    assert "ranks.bin has no files of rank 1" in refused(folder)
    replace_rows(folder, rows[:24])
    assert "ranks.bin has 28 bytes, expected 52" in refused(folder)
    replace_rows(folder, rows)
    assert verify_checkpoint(find_folder(str(folder))).findings == []


@examples(300)
@given(st.data())
def test_broken_bytes_give_one_sentence(data: Any) -> None:
    """Without checksums to protect them: a parser raises UntrustedError or reads what is there."""
    index = write_rank_index([OWN], [1, 2, 3, 4])
    chosen = data.draw(st.sampled_from([write_layout(LAYOUT), index]))
    at = data.draw(st.integers(0, len(chosen) - 1))
    change = data.draw(st.binary(max_size=8))
    broken = chosen[:at] + change + chosen[at + data.draw(st.integers(0, 8)) :]
    try:
        if chosen is index:
            read_rank_index(broken, 1, RankRecord(2**20, 100, 0, 0, 0), LAYOUT)
        else:
            read_layout(broken, 2)
    except UntrustedError as error:
        assert "\n" not in str(error)


def test_an_index_cannot_ask_for_more_than_it_has() -> None:
    """A length beyond the end of the file."""
    data = struct.pack("<4sI", b"SWI2", 2**32 - 1) + b"[]"
    with pytest.raises(UntrustedError, match="not an index"):
        read_rank_index(data, 1, RankRecord(), LAYOUT)
