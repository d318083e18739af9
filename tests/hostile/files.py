"""Hostile files: each is written by a function into a folder that has nothing else."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What code in a file would do, if it ran.
CANARY = "canary"
TOUCH = f"touch ../{CANARY}"


class _Evil:
    def __reduce__(self) -> Any:
        return os.system, (TOUCH,)


def _zipped(head: bytes, piece: bytes, megabytes: int) -> bytes:
    return gzip.compress(head + piece * (megabytes * 1_000_000 // len(piece)), 6)


def _event(**more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1.0, "dur": 2.0,
            "args": {"device": 0, "stream": 7}, **more}  # fmt: skip


def _trace(*events: Any, **more: Any) -> bytes:
    return json.dumps({"traceEvents": list(events), **more}).encode()


_RUN = 'model = "gpt2"\ncluster = "8xH100-SXM"\nstrategy = "zero3"\n'
CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "zeros": bytes(100_000),
    "random": bytes(n * 7919 % 251 for n in range(100_000)),
    "surrogates": b"\xed\xa0\x80" * 1000,
    "escape": b"\x1b]0;x\x07\x1b[2J\xe2\x80\xae" * 100,
    "one line": b"a" * 5_000_000,
    "deep list": b"[" * 200_000,
    "deep dict": b'{"a":' * 200_000,
    "digits": b'{"a": ' + b"9" * 100_000 + b"}",
    "digits in toml": b"steps = " + b"9" * 100_000,
    "NaN": b'{"a": NaN, "b": Infinity, "traceEvents": NaN}',
    "null": b"null",
    "number": b"1e999",
    "list": b"[[[], {}, null, 1e308]]",
    "duplicate": b'{"a": 1, "a": 2}',
    "deep toml": b"a = " + b"[" * 100_000,
    "long key": b"a" * 5_000_000 + b" = 1",
    "dotted": b".".join([b"a"] * 100_000) + b" = 1",
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
    "pickle sets": b"\x80\x04](" + b"\x8f" * 10_000_000 + b"e.",
    "pickle nested": b"\x80\x02)" + b"\x85" * 1_000_000 + b".",
    "pickle digits": pickle.dumps({"segments": [{"address": 10**6000}]}),
    "pickle cut": pickle.dumps({"segments": list(range(1000))})[:-500],
    "gzip cut": gzip.compress(_trace(*[_event()] * 1000))[:60],
    "gzip zeros": _zipped(b"", b"\0" * 1000, 400),
    "gzip name": _zipped(b'{"traceEvents":[{"ph":"X","name":"', b"a" * 1000, 400),
    "gzip events": _zipped(b'{"traceEvents":[', b'{"ph":"X","ts":1,"dur":1},', 200),
    "gzip separators": _zipped(b'{"traceEvents":[', b"},{", 60),
    "gzip lists": _zipped(b"[", b"[],", 100),
    "trace names": _trace(_event(name="\x1b[2J\u202e\ud800"), _event(name="<script>")),
    "trace times": _trace(_event(ts=1e308), _event(ts=-1, dur=None), _event(dur=1e18)),
    "trace args": _trace(_event(args={"device": 1e99, "stream": [], "Group size": "9" * 9999})),
}


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
KINDS = (*CONTENTS, *_SPECIAL)


def write(kind: str, path: Path) -> None:
    """Write the file of this kind, and beside it a module that must not be imported."""
    (path.parent / "typer.py").write_text(f"import os\nos.system({TOUCH!r})\n")
    if kind in _SPECIAL:
        _SPECIAL[kind](path)
    else:
        path.write_bytes(CONTENTS[kind])
