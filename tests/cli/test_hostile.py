"""Plan, estimate, whatif and import on files that mean harm: a sentence or an answer, no more."""

from __future__ import annotations

import os
import pickle
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise import cli, observe, planning, predict, runs, spec
from shardwise.stacks import read
from tests.cli.test_foreign_text import OBEYED, harmless
from tests.forks import Forks
from tests.hostile.files import zipped

# The memory of a call.
MAX_BYTES = 1 << 30
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
    "bomb": zipped(b"[", b" ", 268),
    "yaml": b"a: &a [x]\nb: !!python/object/apply:os.system ['touch ran']\nc: *a\n",
    "factory": b'cluster = "8xH100-SXM"\n[model]\nfactory = "os.system(\'touch ran\'):x"\n',
}
SPECIAL = ("pipe", "device", "folder", "sparse")


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """Forks of a process that has imported what calls import, which takes longer than most."""
    rooms = (cli, spec, planning, predict, runs, observe, read)
    modules = [found.name for room in rooms
               for found in pkgutil.iter_modules(room.__path__, f"{room.__name__}.")]  # fmt: skip
    with Forks(*modules) as small:
        yield small


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
def test_no_file_does_harm(command: str, tmp_path: Path, forks: Forks) -> None:
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
        ended = forks.command(*words, folder=folder)
        outside = {one.name for one in folder.parent.iterdir()} - {"here"}
        wrong = [
            ended.code not in (0, 1, 2) and f"exit code {ended.code}",
            any(word in ended.text for word in ("Traceback", "unexpected")) and "not caught",
            (folder / "ran").exists() and "code was run",
            outside and f"wrote {outside}",
            ended.peak_bytes > MAX_BYTES and f"{ended.peak_bytes >> 20} MiB",
            not harmless(ended.text) and "printed what a terminal obeys",
        ]
        problems += [f"{kind}: {one}: {ended.text[-300:]}" for one in wrong if one]
    assert not problems, "\n".join(problems)
