"""Errors of a checkpoint that name the broken file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.checkpoint.format.checksum import crc32
from shardwise.checkpoint.format.paths import UntrustedError


class BrokenFileError(UntrustedError):
    """A file of a checkpoint is corrupt or malicious; `file` and `why` say which and how."""

    def __init__(self, file: str, why: str) -> None:
        self.file, self.why = file, why
        super().__init__(f"{file} {why}")


class UnreadableFileError(BrokenFileError):
    """A file could not be read because its file system or store failed; it may be intact."""


@contextmanager
def naming_broken_file(name: str) -> Iterator[None]:
    """Context manager that turns errors of its block into a BrokenFileError of the file `name`.

    An I/O error becomes an UnreadableFileError.
    """
    try:
        yield
    except FileNotFoundError:
        raise BrokenFileError(name, "is missing") from None
    except UntrustedError as error:
        raise BrokenFileError(name, str(error)) from None
    except OSError as error:
        why = f"cannot be read: {error.strerror or error}"
        raise UnreadableFileError(name, why) from error


def check_bytes(data: bytes, size: int, checksum: int, what: str = "") -> None:
    """Raise UntrustedError unless `data` has this size and CRC32.

    `what` names the part of a file that it is, for the message.
    """
    where = f"{what} " if what else ""
    if len(data) != size:
        raise UntrustedError(f"{where}has {len(data):,} bytes, expected {size:,}")
    if (value := crc32(data)) != checksum:
        raise UntrustedError(f"{where}has checksum {value:08x}, expected {checksum:08x}")
