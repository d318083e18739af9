"""What is written for torchtitan, as torchtitan's own configuration classes read it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.predict.api import estimate_run
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.stacks.write.torchtitan import export
from tests.command import PATIENCE_S, ROOT
from tests.stacks.runs import HOSTILE, HOSTILE_NAME, large, tiny

RUNS: dict[str, RunSpec] = {
    "llama_8b": large(),
    "llama_1b": large(model="llama-3.2-1b"),
    "llama_70b": large(model="llama-3.1-70b"),
    "llama_2": large(model="llama-2-13b", job={"seq_len": 4096}),
    "qwen_4b": large(model="qwen3-4b"),
    "qwen_moe": large(model="qwen3-30b-a3b"),
    "experts": large(model="qwen3-30b-a3b", strategy={"kind": "zero3", "expert": 8}),
    "custom": tiny(
        strategy={"kind": "zero2", "recompute": "full", "compile": True},
        train={
            "steps": 50,
            "warmup_steps": 7,
            "clip_norm": 0,
            "checkpoint": {"every": 20, "keep": 1, "background": False},
        },
    ),
    "tied": tiny(model={"tied": True, "rope_theta": 7e4}, strategy={"recompute": "selective"}),
    "hybrid": large(
        strategy={"kind": "hsdp", "micro_batch": 2, "accumulate": 4, "recompute": 0.5},
        train={"steps": 60, "schedule": "constant", "checkpoint": False, "trackers": ["wandb"]},
    ),
    "ddp": tiny(strategy={"kind": "ddp"}, job={"optimizer": "adam"}),
    "chunked": large(strategy={"kind": "zero3", "loss": "chunked", "loss_chunks": 12}),
    "offload": large(strategy={"kind": "zero3", "offload": True, "master_dtype": "bf16"}),
    "hostile": tiny(model={"name": HOSTILE_NAME}, data={"tokenizer": HOSTILE}),
}


@pytest.fixture(scope="module")
def understood(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All of them, read by one process: importing torchtitan takes long."""
    if importlib.util.find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed")
    folder = tmp_path_factory.mktemp("titan")
    for name, run in RUNS.items():
        (folder / f"{name}.py").write_text(export(run).text)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/stacks/titan_read.py"), *RUNS],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    if "No module named 'triton'" in done.stderr:
        pytest.skip("torchtitan cannot be imported without triton")
    assert done.returncode == 0, done.stderr[-3000:]
    assert not list(folder.rglob("pwned"))
    found: dict[str, Any] = json.loads(done.stdout.partition("RESULT ")[2])
    return found


@pytest.mark.nightly
def test_the_model_has_the_same_parameters(understood: dict[str, Any]) -> None:
    for name, run in RUNS.items():
        # Expert parallelism divides parameters, and adds none.
        whole = run._replace(strategy=run.strategy.but(expert=1))
        expected = estimate_run(whole).model["parameters"]
        assert understood[name]["parameters"] == expected, name
        assert understood[name]["tied"] == run.model.tied, name  # type: ignore[union-attr]
        theta = run.model.rope_theta or 10_000  # type: ignore[union-attr]
        assert understood[name]["theta"] == theta, name


@pytest.mark.nightly
def test_flavors_are_used_where_there_are_some(understood: dict[str, Any]) -> None:
    flavors = {name: one["flavor"] for name, one in understood.items()}
    assert flavors["llama_8b"] == "8B"
    assert flavors["llama_1b"] == "1B"
    assert flavors["llama_70b"] == "70B"
    assert flavors["qwen_4b"] == "4B"
    assert flavors["qwen_moe"] == "30B-A3B"
    assert flavors["llama_2"] == flavors["custom"] == flavors["tied"] == "custom"


@pytest.mark.nightly
def test_degrees_batches_and_dtypes(understood: dict[str, Any]) -> None:
    for name, run in RUNS.items():
        strategy = run.strategy
        training, parallelism = understood[name]["training"], understood[name]["parallelism"]
        assert parallelism["data_parallel_shard_degree"] == strategy.shard
        assert parallelism["data_parallel_replicate_degree"] == strategy.replicate
        assert parallelism["tensor_parallel_degree"] == 1
        assert parallelism["expert_parallel_degree"] == strategy.expert
        per_rank = training["global_batch_size"] / strategy.devices
        assert per_rank == strategy.micro_batch * strategy.accumulate
        assert training["local_batch_size"] == strategy.micro_batch
        assert training["seq_len"] == run.job.seq_len
        assert training["disable_cuda_graphs"] is True
        low = {"bf16": "bfloat16", "fp32": "float32"}
        assert training["mixed_precision_param"] == low[strategy.param_dtype]
        assert training["dtype"] == low[strategy.master_dtype]
    assert understood["offload"]["training"]["enable_cpu_offload"] is True
    assert understood["hybrid"]["parallelism"]["data_parallel_shard_degree"] == 8


@pytest.mark.nightly
def test_resharding_and_recomputation(understood: dict[str, Any]) -> None:
    reshard = {n: o["parallelism"]["fsdp_reshard_after_forward"] for n, o in understood.items()}
    assert reshard["llama_8b"] == reshard["hybrid"] == "default"
    assert reshard["custom"] == reshard["ddp"] == "never"
    recompute = {name: one["recompute"] for name, one in understood.items()}
    assert recompute["llama_8b"] is None
    assert recompute["custom"] == recompute["hybrid"] == "FullAC.Config"
    assert recompute["tied"] == "SelectiveAC.Config"
    assert understood["custom"]["compile"] == {
        "enable": True,
        "enable_async_tensor_parallel": False,
        "components": ["model"],
        "backend": "inductor",
    }


@pytest.mark.nightly
def test_the_loss(understood: dict[str, Any]) -> None:
    """Chunks that divide a sequence: 16 where 12 were planned."""
    assert understood["llama_8b"]["loss"] == {"kind": "CrossEntropyLoss.Config", "chunks": None}
    assert understood["chunked"]["loss"] == {"kind": "ChunkedLossWrapper.Config", "chunks": 16}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["custom", "hybrid", "tied"])
def test_the_learning_rates_are_ours(understood: dict[str, Any], name: str) -> None:
    """Cosine with and without warm-up, and constant, step by step."""
    train = RUNS[name].train
    assert train is not None
    rates = understood[name]["learning_rates"]
    assert rates == pytest.approx([train.learning_rate_at(step) for step in range(len(rates))])


@pytest.mark.nightly
def test_the_rest(understood: dict[str, Any]) -> None:
    saves = understood["custom"]["checkpoint"]
    assert (saves["enable"], saves["interval"], saves["keep_latest_k"]) == (True, 20, 2)
    assert saves["async_mode"] == "disabled"
    assert understood["custom"]["training"]["max_norm"] == float("inf")
    assert understood["hybrid"]["checkpoint"]["enable"] is False
    assert understood["hybrid"]["metrics"]["enable_wandb"] is True
    assert understood["ddp"]["optimizer"]["param_groups"][0]["optimizer_name"] == "Adam"
    assert understood["hostile"]["assets"] == str(Path(HOSTILE))


def keys(run: RunSpec) -> set[str]:
    """The settings that its sentences begin with: `setting = value, setting = value: ...`."""
    starts = [sentence.partition(": ")[0] for sentence in export(run).unsupported]
    return {part.partition(" = ")[0] for start in starts for part in start.split(", ")}


def test_what_it_cannot_say_is_told() -> None:
    run = large(
        strategy={
            "kind": "zero3",
            "reshard_after_forward": 8,
            "accumulate": 4,
            "grad_sync": "last",
            "reshard_after_backward": False,
            "prefetch": 2,
            "blocks_per_unit": 2,
            "recompute": 0.25,
            "reduce_dtype": "bf16",
        },
        job={"seq_len": 8192, "optimizer": "lion"},
        train={"non_finite": "skip", "checkpoint": {"to": "s3://bucket/runs", "keep": 1}},
    )
    settings = ("reshard_after_forward", "grad_sync", "reshard_after_backward", "prefetch",
                "blocks_per_unit", "recompute", "reduce_dtype")  # fmt: skip
    assert keys(run) == {
        *settings,
        *("model", "Units", "job.optimizer", "data", "data.tokenizer", "train.non_finite"),
        *("train.checkpoint.minutes", "train.checkpoint.to", "train.checkpoint.keep"),
    }


def test_a_chunked_loss_comes_back() -> None:
    exact = export(large(strategy={"kind": "zero3", "loss": "chunked"}))
    assert (exact.applied.loss, exact.applied.loss_chunks) == ("chunked", 8)
    assert not {"loss", "loss_chunks"} & keys(large(strategy={"kind": "zero3", "loss": "chunked"}))
    assert export(RUNS["chunked"]).applied.loss_chunks == 16
    assert "loss_chunks" in keys(RUNS["chunked"])


def test_trackers() -> None:
    """Unset, TensorBoard, as everywhere."""
    unset = export(large()).text
    assert "enable_tensorboard=True" in unset
    assert "enable_wandb=False" in unset
    assert "enable_tensorboard=False" in export(large(train={"trackers": ["wandb"]})).text


def test_a_tokenizer_is_in_its_folder() -> None:
    for written in ("assets/mine", "assets/mine/tokenizer.json"):
        assert "hf_assets_path='assets/mine'," in export(large(data={"tokenizer": written})).text


def test_what_it_can_say_is_not() -> None:
    run = large(
        model="llama-3.2-1b",
        data={"tokenizer": "tokenizer.json"},
        train={"checkpoint": {"every": 100}},
    )
    assert keys(run) == {"model", "data"}


@pytest.mark.parametrize("model", ["gpt2", "gemma-2-9b", "qwen2.5-7b", "mixtral-8x7b", "olmo-2-7b"])
def test_other_models_are_refused(model: str) -> None:
    with pytest.raises(SpecError, match="model: torchtitan"):
        export(large(model=model, job={"seq_len": 1024}))
