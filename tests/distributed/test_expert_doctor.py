"""Doctor for experts: each mistake fails the check of its name, and sound code passes all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import shardwise
from tests.distributed.workers import Workers
from tests.gate import first_in_gate

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.distributed.expert_doctor_run import HERE, diagnose

SOUND = [
    ("gpt_oss", "with_replicas"),
    ("mixtral", "with_replicas"),
    ("qwen3_moe", "with_replicas"),
    ("olmoe", "with_replicas"),
    ("deepseek_v3", "with_replicas"),
    ("Own", "sharded"),
]
EXPERTS, OTHERS = "gradients of experts as of one process", "other gradients as of one process"
ROUTERS, RANKS = "routers are trained", "gradients equal on all ranks"
NORM, ADAPTERS = "gradient norm", "adapters reach experts"
# A mistake, and the checks that fail.
PLANTED = [
    ("mixtral", "divided_twice", {EXPERTS}),
    ("mixtral", "unreduced", {EXPERTS, RANKS}),
    ("qwen3_moe", "with_partial_norm", {NORM}),
    ("frozen_router", "with_replicas", {ROUTERS}),
    ("detached_router", "sharded", {ROUTERS}),
    ("adapted", "with_replicas", {ADAPTERS}),
]


def failed(workers: Workers, model: str, sharding: str) -> set[str]:
    """The names of failed checks, which are the same on every rank but for gradients of ranks."""
    [ranks] = workers.run(diagnose, 4, [{"model": model, "sharding": sharding}])
    assert all(found.keys() == ranks[0].keys() for found in ranks)
    assert {EXPERTS, OTHERS, ROUTERS, RANKS, NORM} <= ranks[0].keys()
    return {name for found in ranks for name, passed in found.items() if passed is False}


@pytest.mark.parametrize(("model", "sharding"), first_in_gate(1, SOUND))
def test_sound_code_passes(model: str, sharding: str, workers: Workers) -> None:
    assert failed(workers, model, sharding) == set()


@pytest.mark.parametrize(("model", "sharding", "checks"), first_in_gate(3, PLANTED))
def test_a_mistake_is_found(model: str, sharding: str, checks: set[str], workers: Workers) -> None:
    if model == "adapted":
        pytest.importorskip("peft")
    assert failed(workers, model, sharding) == checks


@pytest.mark.nightly
def test_the_command_checks_code_of_a_user(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'model = "{HERE}:mixtral"\ncluster = "4xH100-SXM"\nstrategy = "zero3"\n')
    for sharding, code in (("with_replicas", 0), ("divided_twice", 1)):
        words = ("doctor", str(file), "--sharding", f"{HERE}:{sharding}", "--json")
        done = shardwise(*words, folder=tmp_path)
        assert done.returncode == code, done.stdout + done.stderr
        checks = {check["name"]: check["passed"] for check in json.loads(done.stdout)["checks"]}
        assert checks[EXPERTS] is (code == 0)
