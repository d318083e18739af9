"""Write accuracy.toml of the catalogue: errors on held-out runs, by device and kind of evidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tomli_w

from benchmarks import memory, prices
from benchmarks.accuracy import errors, project
from benchmarks.accuracy_catalogue import CATALOGUE
from benchmarks.measured.errors import errors_of, figures
from benchmarks.measured.files import Entry
from benchmarks.measured.protocol import Protocol
from benchmarks.validation import read_rows

FILE = CATALOGUE.with_name("accuracy.toml")
HEADER = """\
# Errors of predictions on runs that no coefficient was fitted to, by device. Published: rows with
# split=heldout (time) and mem_split=heldout (memory) of tables of other projects, see
# docs/accuracy.md. Contributed: held-out sources of benchmarks/measured. Errors are of tokens/s and
# of peak memory. Written by `python -m benchmarks.measured report --write`.
"""
Pairs = dict[str, list[tuple[str, float]]]


def evidence(entries: Sequence[Entry], protocol: Protocol) -> list[dict[str, Any]]:
    """All evidence: of published runs, then of contributed ones."""
    return [*published(), *contributed(entries, protocol)]


def published() -> list[dict[str, Any]]:
    """Held-out rows of other projects, predicted with the coefficients of the catalogue."""
    rows = read_rows(("heldout",))[0]
    time: Pairs = {}
    found = errors(rows, prices.predicted(rows, prices.shipped()))
    for row, error in zip(rows, found, strict=True):
        time.setdefault(row.gpu, []).append((project(row.source), float(error)))
    taken: Pairs = {}
    for run in memory.read_runs()[0]:
        if run.split == "heldout" and memory.known_kind(run):
            taken.setdefault(run.device.name, []).append((project(run.source), run.error))
    return _entries("published", time, taken)


def contributed(entries: Sequence[Entry], protocol: Protocol) -> list[dict[str, Any]]:
    """Held-out contributions, as they were predicted; not those on calibrated clusters."""
    time: Pairs = {}
    taken: Pairs = {}
    for entry in entries:
        hardware = entry.run.hardware
        if hardware.device is None or protocol.split(entry.source) == "fit":
            continue
        found = errors_of(entry.run)
        if found.time is not None and not hardware.calibrated:
            time.setdefault(hardware.device, []).append((entry.source, found.time))
        if found.memory is not None:
            taken.setdefault(hardware.device, []).append((entry.source, found.memory))
    return _entries("contributed", time, taken)


def _entries(kind: str, time: Pairs, taken: Pairs) -> list[dict[str, Any]]:
    found = []
    for device in sorted({*time, *taken}):
        entry: dict[str, Any] = {"device": device, "evidence": kind}
        entry |= {
            name: figures(pairs[device])
            for name, pairs in (("time", time), ("memory", taken))
            if device in pairs
        }
        found.append(entry)
    return found


def text_of(found: list[dict[str, Any]]) -> str:
    return f"{HEADER}\n{tomli_w.dumps({'evidence': found}, multiline_strings=False)}"


def write(found: list[dict[str, Any]]) -> None:
    FILE.write_text(text_of(found), encoding="utf-8")
