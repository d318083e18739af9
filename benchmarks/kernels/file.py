"""The file: written, and compared with what the tables give."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.kernels.study import Study
from shardwise.spec import catalogue
from shardwise.spec.kernels import FAMILIES, read_kernels

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "src/shardwise/spec/catalogue/kernels.toml"
PAGE = ROOT / "docs/concepts/kernels.md"
TABLE = re.compile(
    r"(?<=<!-- errors: written by python -m benchmarks.kernels -->\n).*?(?=<!-- end -->)", re.DOTALL
)
HEAD = """\
# Measured kernels by device: coefficients of the forms in spec/kernels.py.
# Made by `python -m benchmarks.kernels` from kernels that others published; do not edit.
# peak: what efficiencies and shares are of, in FLOP/s or bytes/s. spread: standard deviation of
# ln(measured / form); left_out: of rows whose source was left out of the fit. fitted: the range
# that was fitted: tokens a query sees (attention), FLOPs (matmul, head), tokens an expert gets
# (grouped), bytes (the others).
"""
# Fits on another machine may differ in the last digit.
CLOSE = 0.02
ROUNDED = {"spread": 0.002, "left_out": 0.002}


def text_of(studies: Iterable[Study]) -> str:
    """All entries, devices and families in the order of the catalogue."""
    known = list(catalogue.devices())

    def place(study: Study) -> tuple[Any, ...]:
        device = study.key.device
        order = known.index(device) if device in known else len(known)
        return order, device, FAMILIES.index(study.key.family), study.key.kernel, study.key.dtype

    entries = ["\n".join(_entry(study)) for study in sorted(studies, key=place)]
    text = "\n\n".join([HEAD.rstrip("\n"), *entries]) + "\n"
    read_kernels(text, PATH.name)
    return text


def _entry(study: Study) -> Iterator[str]:
    yield f"[[{study.key.device}.{study.key.family}]]"
    for key, value in study.entry.items():
        yield f"{key} = {_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_value(one) for one in value)}]"
    if isinstance(value, float):
        return repr(value) if abs(value) < 1e6 else f"{value:.4g}".replace("e+", "e")
    return json.dumps(value, ensure_ascii=False)


def page_of(table: str) -> str:
    """The page with another table of errors."""
    page = PAGE.read_text(encoding="utf-8")
    return TABLE.sub(lambda _: f"\n{table}\n\n", page)


def differences(text: str, other: str) -> list[str]:
    """What another text says differently: entries that come or go, figures that move."""
    mine, theirs = _flat(text), _flat(other)
    found = [f"only in the file: {name}" for name in sorted(mine.keys() - theirs.keys())]
    found += [f"not in the file: {name}" for name in sorted(theirs.keys() - mine.keys())]
    for name in sorted(mine.keys() & theirs.keys()):
        for key in sorted(mine[name].keys() | theirs[name].keys()):
            here, there = mine[name].get(key), theirs[name].get(key)
            if not _close(here, there, ROUNDED.get(key, 1e-9)):
                found.append(f"{name}: {key} is {here}, the tables give {there}")
    return found


def _flat(text: str) -> dict[str, dict[str, Any]]:
    return {
        f"{device}, {family}, {entry['kernel']}, {entry['dtype']}": entry
        for device, families in tomllib.loads(text).items()
        for family, entries in families.items()
        for entry in entries
    }


def _close(here: Any, there: Any, least: float = 1e-9) -> bool:
    if isinstance(here, float) and isinstance(there, float):
        return math.isclose(here, there, rel_tol=CLOSE, abs_tol=least)
    if isinstance(here, list) and isinstance(there, list):
        return len(here) == len(there) and all(map(_close, here, there))
    return bool(here == there)
