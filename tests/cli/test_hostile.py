"""Plan, estimate, whatif and import on files that mean harm: a sentence or an answer, no more."""

from __future__ import annotations

import gzip
import importlib
import os
import pickle
import pkgutil
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shardwise import cli, observe, planning, predict, report, runs, spec
from shardwise.report import page
from shardwise.stacks import read
from tests.cli.test_foreign_text import OBEYED, harmless

# The limits of a call: seconds of CPU time, and bytes of memory.
CPU_S, MEMORY_KIB = 60, 2**20
# FILE is the file, FOLDER the folder that holds nothing else.
COMMANDS = """
plan FILE.toml
plan --model FILE.json --cluster 8xH100-SXM
plan --model FOLDER --cluster 8xH100-SXM
plan --model gpt2 --cluster FILE.toml
plan --model gpt2 --cluster 8xH100-SXM --current FILE.yaml
estimate FILE.toml
whatif FILE.toml --vary gpus=8,16
import FILE.json
import FILE.yaml --model gpt2 --cluster 8xH100-SXM -o out.toml
import FILE.py
""".strip().splitlines()


class Harm:
    """What runs code where a pickle is loaded."""

    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


CODE = b"open('ran', 'w')\n"
KEY = OBEYED[:-1].replace("\x1b", "\\u001b").replace("\x07", "\\u0007")
CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "binary": bytes(range(256)) * 8,
    "code": CODE,
    "pickle": pickle.dumps(Harm()),
    "deep json": b"[" * 100_000,
    "deep table": b'{"a":' * 3_000 + b"1" + b"}" * 3_000,
    "digits json": b'{"model_type": "llama", "hidden_size": ' + b"9" * 5_000 + b"}",
    "digits toml": b"[job]\nseq_len = " + b"9" * 5_000,
    "long key": b"a" * 900_000 + b" = 1",
    "keys": f'"{KEY}" = 1\n["{KEY}".a]\n'.encode(),
    "names": f'{{"{KEY}": {{"{KEY}": "{KEY}"}}, "traceEvents": [1]}}'.encode(),
    "null": b'{"model": null, "traceEvents": null, "schema": null, "cluster": null}',
    "nan": b'{"traceEvents": [{"ph": "X", "ts": NaN, "dur": 1e999, "name": null}]}',
    "bomb": gzip.compress(b"[" + b" " * 2**28),
    "yaml": b"a: &a [x]\nb: !!python/object/apply:os.system ['touch ran']\nc: *a\n",
    "factory": b'cluster = "8xH100-SXM"\n[model]\nfactory = "os.system(\'touch ran\'):x"\n',
}
SPECIAL = ("pipe", "device", "folder", "sparse")


class Ended(NamedTuple):
    """How a call ended: its exit code, what it printed, and its memory."""

    code: int
    printed: str
    memory_kib: int


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """What calls import, before they are forked: an import takes longer than most of them."""
    for room in (cli, spec, planning, predict, report, page, runs, observe, read):
        for found in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
            importlib.import_module(found.name)


def call(words: list[str], folder: Path) -> Ended:
    """Run the command in a fork of this process, which has imported what it needs."""
    output = folder.parent / "printed"
    child = os.fork()
    if not child:
        try:
            handle = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(handle, stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
            os.chdir(folder)
            signal.setitimer(signal.ITIMER_PROF, CPU_S)
            sys.argv = ["shardwise", *words]
            from shardwise.cli.main import run

            run()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        except BaseException:
            traceback.print_exc()
            code = 70
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    _, status, used = os.wait4(child, 0)
    printed = output.read_text(encoding="utf-8", errors="surrogateescape")
    return Ended(os.waitstatus_to_exitcode(status), printed, used.ru_maxrss)


def plant(kind: str, file: Path) -> None:
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "folder":
        file.mkdir()
    elif kind == "sparse":
        with file.open("wb") as sparse:
            sparse.truncate(2**34)
    else:
        file.write_bytes(CONTENTS[kind])


@pytest.mark.nightly
@pytest.mark.parametrize("command", COMMANDS)
def test_no_file_does_harm(command: str, tmp_path: Path) -> None:
    suffix = next((w[4:] for w in command.split() if w.startswith("FILE")), "/config.json")
    problems = []
    for kind in (*CONTENTS, *SPECIAL):
        folder = tmp_path / kind / "here"
        folder.mkdir(parents=True)
        file = folder / f"file{suffix}" if suffix[0] == "." else folder / suffix[1:]
        plant(kind, file)
        words = [
            str(file) if word.startswith("FILE") else str(folder) if word == "FOLDER" else word
            for word in command.split()
        ]
        ended = call(words, folder)
        outside = {one.name for one in folder.parent.iterdir()} - {"here", "printed"}
        wrong = [
            ended.code not in (0, 1, 2) and f"exit code {ended.code}",
            any(word in ended.printed for word in ("Traceback", "unexpected")) and "not caught",
            (folder / "ran").exists() and "code was run",
            outside and f"wrote {outside}",
            ended.memory_kib > MEMORY_KIB and f"{ended.memory_kib:,} KiB",
            not harmless(ended.printed) and "printed what a terminal obeys",
        ]
        problems += [f"{kind}: {one}: {ended.printed[-300:]}" for one in wrong if one]
    assert not problems, "\n".join(problems)
