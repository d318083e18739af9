"""JSON schemas of the site: they take what is read and printed, and refuse what is wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shardwise.spec import catalogue
from shardwise.spec.record import SpecError
from shardwise.spec.run import SECTIONS, run_from_dict, write_run
from tests.command import shardwise

ROOT = Path(__file__).resolve().parents[1]
LEAST: dict[str, Any] = {"model": "llama-3-8b", "cluster": "8xH100-SXM"}
jsonschema = pytest.importorskip("jsonschema")


@pytest.fixture(autouse=True)
def make(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the documentation is made with."""
    monkeypatch.syspath_prepend(ROOT / "docs")


@cache
def run_checker() -> Any:
    from make.schema import run_schema

    jsonschema.Draft7Validator.check_schema(run_schema())
    return jsonschema.Draft7Validator(run_schema())


# ---- run.toml -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", catalogue.model_names())
def test_a_file_that_is_written_is_valid(name: str) -> None:
    run = run_from_dict({"model": name, "cluster": "2x8xH100-SXM@400Gbps", "adapter": "lora:16"})
    run_checker().validate(tomllib.loads(write_run(run.resolved())))


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").rglob("*cluster.toml")), ids=str)
def test_a_calibrated_cluster_is_valid(path: Path) -> None:
    run_checker().validate({**LEAST, "cluster": tomllib.loads(path.read_text())})


FORMS: list[dict[str, Any]] = [
    {"model": {"preset": "Llama-3-8B", "layers": 4}},
    {"model": {"config": "my-model", "pretrained": True}},
    {"model": {"pretrained": "my-model"}},
    {"model": {"factory": "package.module:function"}},
    {"job": {"loss": "chunked"}},
    {"strategy": "zero3:8 tp2"},
    {"strategy": {"kind": "hsdp", "recompute": 0.5, "reshard_after_forward": 4}},
    {"cluster": {"device": "A100-80GB", "nodes": 2, "devices_per_node": 8, "network": "200Gbps"}},
    {"cluster": "2xa3-megagpu-8g"},
    {"cluster": {"instance": "p5.48xlarge", "nodes": 2}},
    {"adapter": {"rank": 8, "targets": "q_proj"}},
    {"train": {"checkpoint": False}, "data": {"path": "text"}},
    {"data": {"path": "text"}, "eval": {"data": ["a", "b"], "every": 100, "keep_best": True}},
    {"eval": {"data": {"path": "held-out", "packing": False}, "tokens": "64k"}},
]


@pytest.mark.parametrize("change", FORMS, ids=str)
def test_every_form_of_a_section_is_valid(change: dict[str, Any]) -> None:
    run_checker().validate({**LEAST, **change})


VALUES: tuple[object, ...] = (
    -1,
    0,
    1,
    7,
    0.5,
    True,
    "x",
    "",
    "80GiB",
    "400Gbps",
    "4k",
    [],
    ["x"],
    {},
    {"x": 1},
)


def changes() -> Iterator[tuple[str, str, object]]:
    """Each key of each section, and one that does not exist, with values of every type."""
    for section in SECTIONS:
        keys = run_checker().schema["properties"][section]["properties"]
        for key in (*keys, "unknown"):
            yield from ((section, key, value) for value in VALUES)


# What the reader of these sections needs beside the key that is tested.
AROUND: dict[str, dict[str, Any]] = {
    "model": {"preset": "llama-3-8b"},
    "adapter": {"rank": 8},
    "cluster": {"device": "H100-SXM", "devices_per_node": 8},
    "job": {"seq_len": 4096},
    "strategy": {"kind": "zero3"},
    "train": {},
    "data": {},
    "eval": {},
}


def reads(run: dict[str, Any]) -> bool:
    try:
        run_from_dict(run)
    except SpecError:
        return False
    return True


def test_an_editor_marks_nothing_that_is_read() -> None:
    """But for true in place of 1, which is read, and which nobody should write."""
    refused = 0
    for section, key, value in changes():
        run = {**LEAST, section: {**AROUND[section], key: value}}
        if run_checker().is_valid(run):
            continue
        refused += 1
        assert value is True or not reads(run), (section, key, value)
    assert refused > 800


def test_unknown_keys_are_refused_everywhere() -> None:
    def tables(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if "properties" in schema:
            yield schema
            for part in schema["properties"].values():
                yield from tables(part)

    found = list(tables(run_checker().schema))
    assert len(found) > 10
    assert all(table["additionalProperties"] is False for table in found)


@pytest.mark.nightly
def test_an_editor_of_toml_agrees(tmp_path: Path) -> None:
    """taplo is what Even Better TOML checks with; it names the key that is wrong."""
    npx = shutil.which("npx")
    if npx is None:
        pytest.skip("needs npx: taplo comes as a package of npm")
    (tmp_path / "run.schema.json").write_text(json.dumps(run_checker().schema))

    def check(text: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "run.toml").write_text(f"#:schema ./run.schema.json\n{text}")
        words = [npx, "--yes", "@taplo/cli@0.7.0", "check", "run.toml"]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)

    for path in sorted((ROOT / "examples").glob("*.toml")):
        assert check(path.read_text()).returncode == 0, path
    wrong = check('model = "llama-3-8b"\ncluster = "8xH100-SXM"\n[strategy]\nkind = "zero4"\n')
    assert wrong.returncode == 1
    assert "zero4" in wrong.stdout + wrong.stderr


# ---- JSON of commands -----------------------------------------------------------------------

JOB = ("--model", "gpt2-xl", "--seq-len", "1024")
MANY = (*JOB, "--cluster", "2x8xA100-80GB@100Gbps")
QUESTIONS: dict[str, tuple[str, ...]] = {
    "fits": ("plan", *MANY, "--global-batch", "512k", "--for", "deepspeed"),
    "late": ("plan", *MANY, "--tokens", "1T", "--price", "2", "--deadline", "1"),
    "money": ("plan", *MANY, "--objective", "money", "--tokens", "1T", "--deadline", "900"),
    "sequence": ("plan", *MANY, "--objective", "sequence"),
    "memory": ("plan", *MANY, "--objective", "memory"),
    "none fits": ("plan", "--model", "llama-3-70b", "--cluster", "2xA100-40GB"),
    "one device": ("plan", *JOB, "--cluster", "1xH100-SXM"),
    "list price": ("plan", *JOB, "--cluster", "2xp5.48xlarge", "--tokens", "1T"),
    "vary": ("whatif", *MANY, "--vary", "devices=12,32", "--tokens", "1T", "--deadline", "1"),
    "least": ("whatif", *MANY, "--least", "network", "--for", "mfu=30%"),
    "not met": ("whatif", *MANY, "--least", "network", "--for", "mfu=99%"),
}


def closed(schema: Any) -> Any:
    """The same, with no key allowed that it does not name."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(part) for key, part in schema.items()}
    return {**inner, "additionalProperties": False} if "required" in schema else inner


@cache
def answer(question: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shardwise(*QUESTIONS[question], "--json").stdout)
    return found


def answer_checker(question: str) -> Any:
    from make.answers import plan_schema, whatif_schema

    schema = {"plan": plan_schema, "whatif": whatif_schema}[QUESTIONS[question][0]]()
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(closed(schema))


@pytest.mark.parametrize("question", QUESTIONS)
def test_an_answer_has_the_keys_of_its_schema(question: str) -> None:
    answer_checker(question).validate(answer(question))


def test_the_questions_reach_the_rare_parts_of_answers() -> None:
    assert "deadline" in answer("late")
    assert "size" in answer("money")
    assert answer("sequence")["aim"]["kind"] == "longest sequence"
    assert answer("none fits")["winner"] is None
    assert answer("fits")["for_stack"] == "deepspeed"
    assert not answer("not met")["least"]["met"]


WRONG_ANSWERS: list[dict[str, Any]] = [
    {"winner": {}},
    {"schema": 2},
    {"binding": "luck"},
    {"why": [{"kind": "a feeling"}]},
    {"fitting": "many"},
    {"limit_bytes": 0.5},
    {"unknown": 1},
]


@pytest.mark.parametrize("change", WRONG_ANSWERS, ids=str)
def test_a_wrong_answer_is_refused(change: dict[str, Any]) -> None:
    checker = answer_checker("fits")
    assert not checker.is_valid({**answer("fits"), **change})


@pytest.mark.parametrize("key", ["winner", "cost", "why", "cluster"])
def test_an_answer_without_a_key_is_refused(key: str) -> None:
    rest = {name: value for name, value in answer("fits").items() if name != key}
    assert not answer_checker("fits").is_valid(rest)


def test_every_key_of_an_answer_has_a_meaning() -> None:
    from make.answers import plan_schema, whatif_schema

    for schema in (plan_schema(), whatif_schema()):
        for key, value in schema["properties"].items():
            assert value["description"], key
