"""The screen of `shardwise fsck`: a verdict per checkpoint, and its findings."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from shardwise.checkpoint.verify.findings import CheckedCheckpoint, Finding
from shardwise.report.screen import screen

_MAX_FINDINGS, _LABEL = 20, 16
_KINDS = {"shardwise": "Shardwise", "dcp": "torch DCP", "safetensors": "safetensors"}
_ORDER = {"broken": 0, "unverifiable": 1, "stale": 2}
_STYLES = {"broken": "bold red", "unverifiable": "yellow", "stale": "yellow"}


def print_checked(
    checked: Sequence[CheckedCheckpoint],
    incomplete: Sequence[str],
    seconds: float,
) -> None:
    """Print the verdict and findings of each checkpoint, broken findings first.

    `incomplete` are names of checkpoints that were not checked. `seconds` is the total time.
    """
    out = screen()
    for one in checked:
        _show(out, one)
    for name in incomplete:
        state = "incomplete" if name.endswith(".unfinished") else "set aside as broken"
        out.print(f"{name}: {state}, not checked", style="dim")
    if total := sum(one.bytes for one in checked):
        rate = f", {total / max(1e-9, seconds) / 1e9:.2f} GB/s" if total >= 1e8 else ""
        out.print(f"{_bytes(total)} verified in {seconds:.1f} s{rate}", style="dim")


def _show(out: Console, one: CheckedCheckpoint) -> None:
    """Print the verdict, size, findings and notes of one checkpoint."""
    verdict = Text("intact", style="green")
    if not one.intact:
        verdict = Text("broken", style="bold red")
    elif not one.verified:
        verdict = Text("complete, but not verifiable", style="yellow")
    tensors = f"{one.tensors:,} tensor{'s' if one.tensors != 1 else ''}"
    files = f"{one.files:,} file{'s' if one.files != 1 else ''}"
    out.print(Text(f"{one.url}: ") + verdict, soft_wrap=True)
    _line(out, _KINDS[one.kind], "dim", f"{tensors} in {files}")
    findings = sorted(one.findings, key=lambda finding: _ORDER[finding.severity])
    for finding in findings[:_MAX_FINDINGS]:
        _line(out, finding.severity, _STYLES[finding.severity], str(finding))
    if len(findings) > _MAX_FINDINGS:
        _line(out, "", "", f"{len(findings) - _MAX_FINDINGS:,} more; --json lists all")
    for note in one.notes:
        _line(out, "note", "dim", note)


def _line(out: Console, label: str, style: str, text: str) -> None:
    """Print a label in the first column and a text wrapped in the second."""
    width = max(20, out.width - _LABEL)
    lines = textwrap.wrap(text, width, break_on_hyphens=False) or [""]
    out.print(Text(f"  {label:<{_LABEL - 2}}", style=style) + Text(lines[0], style=""))
    for line in lines[1:]:
        out.print(Text(" " * _LABEL + line))


def _bytes(count: int) -> str:
    """Bytes as kB, MB or GB."""
    if count < 1e5:
        return f"{count / 1e3:,.1f} kB"
    return f"{count / 1e9:,.2f} GB" if count >= 1e8 else f"{count / 1e6:,.2f} MB"


def checked_json(one: CheckedCheckpoint) -> dict[str, Any]:
    """A verified checkpoint as a JSON object, with every finding."""
    return {
        "path": one.url,
        "format": one.kind,
        "intact": one.intact,
        "verified": one.verified,
        "files": one.files,
        "tensors": one.tensors,
        "bytes": one.bytes,
        "findings": [_finding_json(finding) for finding in one.findings],
        "notes": list(one.notes),
    }


def _finding_json(finding: Finding) -> dict[str, str]:
    return finding._asdict()
