"""Archives that torch wrote, and what may become of them."""

from __future__ import annotations

import io
import itertools
import struct
import zipfile
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from shardwise.checkpoint.foreign.archive import check_archive  # noqa: E402
from shardwise.checkpoint.verify.window import BUFFER, Window  # noqa: E402


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def found(data: bytes, holds: int | None = None, before: bytes = b"") -> list[tuple[str, str]]:
    """Of an archive amid others."""
    file = io.BytesIO(before + data + before)
    return list(check_archive(Window(file), len(before), len(data), holds))


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6.0),
        torch.ones(0),
        torch.tensor(1),
        torch.ones(3 * BUFFER // 4 + 1),
        torch.ones(3, dtype=torch.complex64),
        {"a": [1, "x"]},
    ],
    ids=["small", "empty", "scalar", "large", "complex", "object"],
)
def test_what_torch_wrote_is_intact(value: Any) -> None:
    holds = value.nbytes if isinstance(value, torch.Tensor) else None
    assert found(saved(value), holds) == []
    assert found(saved(value), holds, before=b"PK\3\4" * 33) == []


def test_every_bit_of_an_archive_is_seen() -> None:
    data = saved(torch.arange(6.0))
    for at, bit in itertools.product(range(len(data)), (0, 3, 7)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << bit
        told = found(bytes(flipped), 24, before=b"another")
        assert [severity for severity, _ in told[:1]] == ["broken"], f"bit {bit} of byte {at}"


def test_a_flip_behind_the_first_buffer_is_seen() -> None:
    value = torch.ones(BUFFER)
    data = bytearray(saved(value))
    data[len(data) // 2] ^= 1
    [(severity, why)] = found(bytes(data), value.nbytes)
    assert severity == "broken"
    assert "data/0 has checksum" in why


def test_without_checksums_it_cannot_be_verified() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        data = saved(torch.arange(6.0))
    finally:
        torch.serialization.set_crc32_options(True)
    assert found(data, 24) == [("unverifiable", "was saved without a checksum")]


def test_a_single_checksum_of_zero_does_not_excuse() -> None:
    value = torch.arange(6.0)
    data = saved(value)
    [crc] = [i.CRC for i in zipfile.ZipFile(io.BytesIO(data)).infolist() if "data/0" in i.filename]
    # Both of its places: behind the data, and in the directory.
    zeroed = data.replace(struct.pack("<I", crc), bytes(4))
    assert len(zeroed) == len(data)
    assert [severity for severity, _ in found(zeroed, 24)] == ["broken"]


def test_a_tensor_with_too_few_bytes() -> None:
    [(severity, why)] = found(saved(torch.ones(4)), 20)
    assert severity == "broken"
    assert "16 of 20 bytes" in why


def python_zip(method: int, entries: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return file.getvalue()


HOSTILE = {
    "nothing": b"",
    "zeros": bytes(1000),
    "cut": saved(torch.ones(9))[:-1],
    "longer": saved(torch.ones(9)) + b"\0",
    "a bomb": python_zip(zipfile.ZIP_DEFLATED, {"archive/data/0": bytes(10_000_000)}),
    "of python": python_zip(zipfile.ZIP_STORED, {"archive/data/0": b"x"}),
    "many entries": python_zip(zipfile.ZIP_STORED, {f"{n}": b"" for n in range(2000)}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_torch_does_not_write_is_refused(name: str) -> None:
    [(severity, why)] = found(HOSTILE[name])
    assert severity == "broken"
    assert "not a torch archive" in why


def test_entries_that_share_bytes_are_refused() -> None:
    """The directory of one archive, with the second entry where the first is."""
    data = bytearray(saved(torch.ones(9)))
    directory = data.index(b"PK\1\2")
    second = data.index(b"PK\1\2", directory + 4)
    data[second + 42 : second + 46] = bytes(4)
    assert [severity for severity, _ in found(bytes(data))] == ["broken"]
