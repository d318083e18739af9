"""The script for Lightning as text: it is Python, names stay text, and losses are told."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from shardwise.spec.run import RunSpec
from shardwise.stacks.lightning import export
from tests.stacks.runs import HOSTILE, large, tiny

RUNS = {
    "zero3": tiny(),
    "hybrid": large(strategy={"kind": "hsdp", "accumulate": 2}),
    "ddp": tiny(strategy={"kind": "ddp", "param_dtype": "bf16", "ddp_bucket_mib": 10}),
    "single": tiny(cluster="1x1xCPU", strategy={"kind": "single"}),
    "transformers": large(model="gpt2", job={"seq_len": 1024}),
    "saves": tiny(train={"checkpoint": {"every": 5, "keep": 0}, "trackers": ["tensorboard"]}),
    "silent": tiny(train={"checkpoint": False, "schedule": "constant", "clip_norm": 0}),
    "hostile": tiny(model={"name": HOSTILE}),
}


def arguments(run: RunSpec) -> dict[str, Any]:
    """What the Trainer is made with, as text."""
    tree = ast.parse(export(run).text)
    [call] = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Trainer"
    ]
    return {word.arg or "": ast.unparse(word.value) for word in call.keywords}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_it_is_python(run: RunSpec) -> None:
    compile(export(run).text, "lightning_run.py", "exec")


def test_what_the_trainer_is_told() -> None:
    found = arguments(RUNS["hybrid"])
    assert found["devices"] == "8"
    assert found["num_nodes"] == "2"
    assert found["accelerator"] == "'gpu'"
    whole = "ModelParallelStrategy(data_parallel_size=16, tensor_parallel_size=1)"
    assert found["strategy"] == whole
    # The policy of fully_shard casts.
    assert found["precision"] == "'32-true'"
    ddp = arguments(RUNS["ddp"])
    assert ddp["precision"] == "'bf16-mixed'"
    assert "bucket_cap_mb=BUCKET_MIB" in ddp["strategy"]
    assert "gradient_clip_val" not in arguments(RUNS["silent"])
    assert arguments(RUNS["silent"])["enable_checkpointing"] == "False"
    assert "save_top_k=-1" in arguments(RUNS["saves"])["callbacks"]
    assert "TensorBoardLogger" in arguments(RUNS["saves"])["logger"]


def test_names_are_text() -> None:
    """Apart from strings and comments, the script is that of a model with a plain name."""

    def code(run: RunSpec) -> str:
        tree = ast.parse(export(run).text)
        tree.body.pop(0)  # the description
        return ast.dump(tree)

    assert code(RUNS["hostile"]) == code(RUNS["zero3"])


def test_what_it_does_not_do_is_told() -> None:
    keys = {loss.partition(":")[0] for loss in export(RUNS["saves"]).losses}
    told = {"train.non_finite", "train.checkpoint", "train.checkpoint.minutes", "train.restart"}
    assert keys == told
    assert "train.checkpoint" not in "".join(export(RUNS["silent"]).losses)
