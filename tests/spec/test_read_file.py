"""Files that mean harm: each is refused in one short sentence, soon, by whoever reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.observe.memory.read import read_memory
from shardwise.report.page.read import read_subjects
from shardwise.runs.find import find_runs
from shardwise.spec.huggingface import config_table
from shardwise.spec.lookup import find_cluster
from shardwise.spec.read_file import is_too_deep, read_json, read_toml
from shardwise.spec.record import SpecError
from shardwise.spec.run import read_run
from shardwise.stacks.read.imports import import_file
from shardwise.step.profile import read_profile_file

DEEP, DIGITS = 100_000, b"9" * 5_000
JSON = {
    "deep list": b"[" * DEEP + b"]" * DEEP,
    "deep table": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "nested": b'{"a":' * 500 + b"1" + b"}" * 500,
    "digits": b'{"model_type": ' + DIGITS + b"}",
    "latin": b'{"a": "\xe9"}',
    "half": b'{"a": ',
    "empty": b"",
}
TOML = {
    "deep list": b"a = " + b"[" * DEEP + b"]" * DEEP,
    "deep table": b"a = " + b"{a = " * 500 + b"1" + b"}" * 500,
    "digits": b"[job]\nseq_len = " + DIGITS,
    "long key": b"a" * 900_000 + b" = 1",
    "long inner key": b"[job]\n" + b"a" * 900_000 + b" = 1",
    "latin": b'a = "\xe9"',
}


@pytest.fixture(params=["pipe", "device", "folder", "missing", "large"])
def special(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What is no file, or none of a size that is read."""
    path = tmp_path / "config.json"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "device":
        path.symlink_to("/dev/zero")
    elif request.param == "folder":
        path = tmp_path / "folder"
        path.mkdir()
    elif request.param == "large":
        with path.open("wb") as file:
            file.truncate(2**33)
    return path


def is_one_short_sentence(read: Callable[[], Any]) -> bool:
    with pytest.raises(SpecError) as refused:
        read()
    (problem,) = refused.value.problems
    return len(problem) < 600 and len(problem.splitlines()) == 1


@pytest.mark.parametrize("read", [read_json, read_toml])
def test_what_is_no_file_is_refused(read: Callable[..., Any], special: Path) -> None:
    assert is_one_short_sentence(lambda: read(special, "run"))


JSON_READERS: dict[str, Callable[[Path], Any]] = {
    "config": config_table,
    "import": import_file,
    "profile": read_profile_file,
    "report": lambda path: read_subjects([path]),
    "memory": read_memory,
}


@pytest.mark.parametrize("content", JSON)
@pytest.mark.parametrize("reader", JSON_READERS)
def test_json_that_is_none_is_refused(reader: str, content: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(JSON[content])
    assert is_one_short_sentence(lambda: JSON_READERS[reader](file))


@pytest.mark.parametrize("content", TOML)
@pytest.mark.parametrize("read", [read_run, lambda path: find_cluster(str(path))])
def test_toml_that_is_none_is_refused(
    read: Callable[[Path], Any], content: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(TOML[content])
    with pytest.raises(SpecError) as refused:
        read(file)
    assert all(len(problem) < 600 for problem in refused.value.problems)


@pytest.mark.parametrize("content", JSON)
def test_a_run_that_cannot_be_read_is_listed(content: str, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "run.json").write_bytes(JSON[content])
    found = find_runs(str(tmp_path))
    assert (len(found.runs), len(found.problems)) == (0, 1)


def test_what_is_usual_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"a": [1, {"b": 1.5}]}', encoding="utf-8-sig")
    assert read_json(file, "a") == {"a": [1, {"b": 1.5}]}
    for text in ('{"a": 1, "a": 2}', '{"a": Infinity}'):
        file.write_text(text)
        with pytest.raises(SpecError):
            read_json(file, "a")
        assert read_json(file, "a", twice=True, nan=True) == json.loads(text)
    assert not is_too_deep(json.loads("[" * 100 + "]" * 100))
    assert is_too_deep(json.loads("[" * 101 + "]" * 101))
