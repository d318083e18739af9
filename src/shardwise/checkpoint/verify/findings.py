"""What is found in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

Kind = Literal["shardwise", "dcp", "safetensors"]
# Not what was saved; nothing says what was saved; not needed by anything that was.
Severity = Literal["broken", "unverifiable", "stale"]

# Told how many bytes were read since it was told last.
Progress = Callable[[int], None]


class Finding(NamedTuple):
    """Something about a file, or about a tensor in it; both may be empty."""

    severity: Severity
    file: str
    tensor: str
    why: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.file, self.tensor, self.why) if part)


class Checked(NamedTuple):
    """One checkpoint. `bytes` have been read and held against a checksum."""

    url: str
    kind: Kind
    files: int
    tensors: int
    bytes: int
    findings: list[Finding]
    # What anyone who relies on the answer should know.
    notes: tuple[str, ...] = ()

    @property
    def broken(self) -> list[Finding]:
        return [one for one in self.findings if one.severity == "broken"]

    @property
    def intact(self) -> bool:
        """Nothing is known to be wrong; some of it may be unverifiable."""
        return not self.broken

    @property
    def verified(self) -> bool:
        return all(one.severity == "stale" for one in self.findings)
