"""The findings of a verified checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

Kind = Literal["shardwise", "dcp", "safetensors"]
# broken: differs from what was saved; unverifiable: no checksum; stale: not of the checkpoint.
Severity = Literal["broken", "unverifiable", "stale"]

# Called with the bytes read since the last call.
Progress = Callable[[int], None]


class Finding(NamedTuple):
    """A finding about a file, or about a tensor in it; `file` and `tensor` may be empty."""

    severity: Severity
    file: str
    tensor: str
    why: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.file, self.tensor, self.why) if part)


class CheckedCheckpoint(NamedTuple):
    """The result of verifying a checkpoint.

    `files` and `tensors` are numbers; `bytes` were compared with a checksum.
    """

    url: str
    kind: Kind
    files: int
    tensors: int
    bytes: int
    findings: list[Finding]
    # Limits of the verification.
    notes: tuple[str, ...] = ()

    @property
    def broken(self) -> list[Finding]:
        return [one for one in self.findings if one.severity == "broken"]

    @property
    def intact(self) -> bool:
        """Whether nothing is broken; parts may be unverifiable."""
        return not self.broken

    @property
    def verified(self) -> bool:
        """Whether nothing is broken or unverifiable; files may be stale."""
        return all(one.severity == "stale" for one in self.findings)
