"""Hostile files: each is written by a function into a folder that has nothing else."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import struct
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

# What code in a file would do, if it ran.
CANARY = "canary"
TOUCH = f"touch ../{CANARY}"


class _Evil:
    def __reduce__(self) -> Any:
        return os.system, (TOUCH,)


def zipped(head: bytes, piece: bytes, megabytes: int) -> bytes:
    """A gzip file of `head`, and of so many megabytes of `piece`.

    One megabyte is compressed, so that it refers to nothing before it, and repeated as it is.
    """
    block = piece * (1_000_000 // len(piece))
    packer = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
    first, packed = (
        packer.compress(one) + packer.flush(zlib.Z_FULL_FLUSH) for one in (head, block)
    )
    checksum = zlib.crc32(head)
    for _ in range(megabytes):
        checksum = zlib.crc32(block, checksum)
    tail = struct.pack("<II", checksum, len(head) + megabytes * len(block))
    return b"\x1f\x8b\x08" + bytes(7) + first + packed * megabytes + packer.flush() + tail


def _event(**more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1.0, "dur": 2.0,
            "args": {"device": 0, "stream": 7}, **more}  # fmt: skip


def _trace(*events: Any, **more: Any) -> bytes:
    return json.dumps({"traceEvents": list(events), **more}).encode()


_RUN = 'model = "gpt2"\ncluster = "8xH100-SXM"\nstrategy = "zero3"\n'
_SMALL: dict[str, bytes] = {
    "empty": b"",
    "escape": b"\x1b]0;x\x07\x1b[2J\xe2\x80\xae" * 100,
    "NaN": b'{"a": NaN, "b": Infinity, "traceEvents": NaN}',
    "null": b"null",
    "number": b"1e999",
    "list": b"[[[], {}, null, 1e308]]",
    "duplicate": b'{"a": 1, "a": 2}',
    "run": _RUN.encode(),
    "factory": b'model = "evil:make"\ncluster = "8xH100-SXM"\n',
    "source": _RUN.encode() + b'[data]\nsource = "evil:make"\n',
    "control names": b'model = "\\u001b[2J\\u202e"\ncluster = "\\n\\r"\n',
    "not numbers": _RUN.encode() + b"[job]\nseq_len = nan\nglobal_batch = inf\n",
    "negative": _RUN.encode() + b"[job]\nseq_len = -1\nglobal_batch = -99999999999999999999\n",
    "yaml code": f"!!python/object/apply:os.system ['{TOUCH}']\n".encode(),
    "yaml laughs": b"a: &a [x,x]\n"
    + b"".join(b"%c: &%c [*%c,*%c]\n" % (n + 1, n + 1, n, n) for n in range(97, 121)),
    "yaml key": b"\"x\\n[data]\\nsource = 'evil:make'\\n#\": 1\nmodel_name_or_path: gpt2\n",
    "python code": f"import os\nos.system({TOUCH!r})\n".encode(),
    "python deep": b"x = " + b"(" * 5_000,
    "python power": b"x = 9 ** 9 ** 9 ** 9\n",
    "pickle code": pickle.dumps(_Evil()),
    "pickle inst": b"\x80\x02(X"
    + struct.pack("<I", len(TOUCH))
    + TOUCH.encode()
    + b"iposix\nsystem\n.",
    "pickle memo": b"\x80\x02]r\xff\xff\xff\x7f.",
    "pickle digits": pickle.dumps({"segments": [{"address": 10**6000}]}),
    "pickle cut": pickle.dumps({"segments": list(range(1000))})[:-500],
    "trace names": _trace(_event(name="\x1b[2J\u202e\ud800"), _event(name="<script>")),
    "trace times": _trace(_event(ts=1e308), _event(ts=-1, dur=None), _event(dur=1e18)),
    "trace args": _trace(_event(args={"device": 1e99, "stream": [], "Group size": "9" * 9999})),
}
# Made when they are written: whoever only collects tests pays for none.
_LARGE: dict[str, Callable[[], bytes]] = {
    "zeros": lambda: bytes(100_000),
    "random": lambda: bytes(n * 7919 % 251 for n in range(100_000)),
    "surrogates": lambda: b"\xed\xa0\x80" * 1000,
    "one line": lambda: b"a" * 5_000_000,
    "deep list": lambda: b"[" * 200_000,
    "deep dict": lambda: b'{"a":' * 200_000,
    "digits": lambda: b'{"a": ' + b"9" * 100_000 + b"}",
    "digits in toml": lambda: b"steps = " + b"9" * 100_000,
    "deep toml": lambda: b"a = " + b"[" * 100_000,
    "long key": lambda: b"a" * 5_000_000 + b" = 1",
    "dotted": lambda: b".".join([b"a"] * 100_000) + b" = 1",
    "pickle sets": lambda: b"\x80\x04](" + b"\x8f" * 10_000_000 + b"e.",
    "pickle nested": lambda: b"\x80\x02)" + b"\x85" * 1_000_000 + b".",
    "gzip cut": lambda: gzip.compress(_trace(*[_event()] * 1000))[:60],
    "gzip zeros": lambda: zipped(b"", b"\0" * 1000, 400),
    "gzip name": lambda: zipped(b'{"traceEvents":[{"ph":"X","name":"', b"a" * 1000, 400),
    "gzip events": lambda: zipped(b'{"traceEvents":[', b'{"ph":"X","ts":1,"dur":1},', 200),
    "gzip separators": lambda: zipped(b'{"traceEvents":[', b"},{", 60),
    "gzip lists": lambda: zipped(b"[", b"[],", 100),
}


@cache
def _large(kind: str) -> bytes:
    return _LARGE[kind]()


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


_SPECIAL: dict[str, Callable[[Path], None]] = {
    "missing": lambda path: None,
    "folder": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
    "private": lambda path: path.symlink_to("/proc/self/mem"),
    "sparse": _sparse,
}
KINDS = (*_SMALL, *_LARGE, *_SPECIAL)


def write(kind: str, path: Path) -> None:
    """Write the file of this kind, and beside it a module that must not be imported."""
    (path.parent / "typer.py").write_text(f"import os\nos.system({TOUCH!r})\n")
    if kind in _SPECIAL:
        _SPECIAL[kind](path)
    else:
        path.write_bytes(_SMALL[kind] if kind in _SMALL else _large(kind))
