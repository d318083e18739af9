"""Cache of parsed traces as Parquet, which loads faster than JSON parses.

An entry is valid while its trace has the same path, size and modification time.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.observe.file.trace import Trace, read_trace
from shardwise.spec.record import SpecError

# Increase when a column changes its meaning.
_VERSION = 4
_ROWS = ("name", "category", "process", "thread", "start_ns", "end_ns", "device", "stream",
         "correlation", "moved")  # fmt: skip
_SPARSE = ("collective", "sent", "received", "dtype", "group", "group_ranks", "group_size")
_TEXTS = ("shapes", "types")
_MEMORY = ("memory_ns", "memory_bytes", "memory_of")


def cached_trace(path: Path, folder: Path | None) -> Trace:
    """Read the trace at `path`, from its entry in the cache `folder` if there is one.

    Otherwise the file is parsed and added to the cache. `folder` None uses no cache.
    """
    if folder is None:
        return read_trace(path)
    try:
        from pyarrow import parquet
    except ImportError:
        raise SpecError("--cache: needs pyarrow; pip install 'shardwise[data]'") from None
    try:
        status = path.stat()
    except OSError as error:
        raise SpecError(f"trace: cannot read {path}: {error.strerror or error}") from None
    origin = f"{_VERSION} {path.resolve()} {status.st_size} {status.st_mtime_ns}"
    entry = folder / f"{hashlib.sha256(origin.encode()).hexdigest()[:20]}.parquet"
    if entry.exists():
        try:
            return _load(parquet.read_table(entry), path)
        except (OSError, ValueError, KeyError):
            pass  # corrupt entry: written again below
    trace = read_trace(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = entry.with_suffix(f".{hash(origin):x}.part")
        parquet.write_table(_table(trace), unfinished)
        unfinished.replace(entry)
    except OSError as error:
        raise SpecError(f"--cache: cannot write {folder}: {error.strerror or error}") from None
    return trace


def _table(trace: Trace) -> Any:
    """Arrow table of a trace: a row per event; all other fields are JSON in its metadata."""
    import pyarrow

    columns = {name: pyarrow.array(getattr(trace, name)) for name in _ROWS}
    absent = np.ones(len(trace), dtype=np.bool_)
    absent[trace.collective_row] = False
    for name in _SPARSE:
        values = np.zeros(len(trace), dtype=np.int64)
        values[trace.collective_row] = getattr(trace, name)
        columns[name] = pyarrow.array(values, mask=absent)
    for name in _TEXTS:
        known: dict[int, bytes] = getattr(trace, name)
        values = np.full(len(trace), None, dtype=object)
        values[list(known)] = list(known.values())
        columns[name] = pyarrow.array(values, type=pyarrow.binary())
    rest = {"texts": trace.texts, "about": trace.about, "problems": trace.problems}
    rest |= {name: getattr(trace, name).tolist() for name in _MEMORY}
    return pyarrow.table(columns).replace_schema_metadata({"trace": json.dumps(rest)})


def _load(table: Any, path: Path) -> Trace:
    """The trace that `_table` wrote, as read from the file at `path`."""
    rest = json.loads(table.schema.metadata[b"trace"])
    columns: dict[str, Any] = {name: table[name].to_numpy() for name in _ROWS}
    present = np.flatnonzero(np.asarray(table["collective"].is_valid()))
    columns["collective_row"] = present.astype(np.int64)
    codes = {f.name for f in fields(Trace) if f.type == "Codes"}
    for name in _SPARSE:
        values = table[name].drop_null().to_numpy()
        columns[name] = values.astype(np.int32 if name in codes else np.int64)
    for name in _TEXTS:
        rows = np.flatnonzero(np.asarray(table[name].is_valid())).tolist()
        columns[name] = dict(zip(rows, table[name].drop_null().to_pylist(), strict=True))
    columns |= {name: np.asarray(rest.pop(name), dtype=np.int64) for name in _MEMORY}
    return Trace(path=path, **columns, **rest)
