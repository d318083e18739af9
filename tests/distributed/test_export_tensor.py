"""Scripts that divide matrices and sequences train to the losses of one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.spec.run import RunSpec, run_from_dict
from shardwise.stacks.write.exports import export_run
from tests.distributed.launch import launcher, output_of

pytest.importorskip("torch")
pytest.importorskip("transformers")

LLAMA = {"family": "llama", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48,
         "vocab": 128}  # fmt: skip
QWEN3 = {**LLAMA, "family": "qwen3", "tied": True}
QWEN2 = {**LLAMA, "family": "qwen2"}
TRAIN = {"steps": 4, "learning_rate": 1e-2, "clip_norm": 0.5, "log_every": 1, "measure": False,
         "checkpoint": False, "threads": 1}  # fmt: skip


def written(model: dict[str, Any], strategy: dict[str, Any], processes: int) -> RunSpec:
    """A run in fp64, in which another order of sums does not show."""
    data = {
        "model": model,
        "cluster": f"1x{processes}xCPU",
        "job": {"seq_len": 16},
        "strategy": {"accumulate": 2, **dict.fromkeys(DTYPES, "fp64"), **strategy},
        "train": TRAIN,
    }
    return run_from_dict(data).resolved()


DTYPES = ("param_dtype", "reduce_dtype", "master_dtype")


def figures(run: RunSpec, folder: Path) -> list[tuple[float, float]]:
    """The loss and the norm of the gradients after every step of a run's script."""
    folder.mkdir()
    (folder / "train.py").write_text(export_run(run, "python").text)
    alone = run.cluster.devices == 1
    start = (sys.executable,) if alone else launcher(run.cluster.devices)
    output_of([*start, "train.py"], folder, GLOO_SOCKET_IFNAME="lo")
    text = (folder / "trained" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return [(line["loss"], line["gradient_norm"]) for line in lines]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Two devices shard what two devices divide.
    "tensor": (LLAMA, {"kind": "zero3", "tensor": 2, "recompute": "full"}),
    "whole activations": (QWEN2, {"kind": "zero2", "tensor": 2, "sequence_parallel": False}),
    "tied": (QWEN3, {"kind": "zero1", "tensor": 2, "tensor_across_nodes": True}),
    # More devices of a sequence than key and value heads on each.
    "context": (LLAMA, {"kind": "zero3", "context": 2, "loss": "chunked"}),
    "groups": (QWEN3, {"kind": "zero3", "shard": 1, "replicate": 2, "context": 2}),
    "both": (QWEN3, {"kind": "zero3", "context": 2, "tensor": 2, "recompute": "full"}),
}


# Each starts processes of its own; one script of test_export_python.py is in the gate.
@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_a_divided_script_trains_as_one_process(tmp_path: Path, name: str) -> None:
    model, strategy = CASES[name]
    check(model, strategy, tmp_path)


def check(model: dict[str, Any], strategy: dict[str, Any], folder: Path) -> None:
    divided = written(model, {**strategy, "micro_batch": 2}, processes=4)
    # The same sequences in every step, all of them in one process.
    rows = 2 * divided.strategy.data_parallel
    single = written(model, {"kind": "single", "micro_batch": rows}, processes=1)
    found, expected = figures(divided, folder / "four"), figures(single, folder / "one")
    assert len(expected) == 4
    assert len(set(expected)) == 4
    # Losses are added up in fp32, norms are not.
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-6)
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=1e-12)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.nightly
def test_a_model_that_transformers_builds(tmp_path: Path, sequence_parallel: bool) -> None:
    """Scaled rotary positions are left to transformers."""
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
             "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 128}  # fmt: skip
    file = tmp_path / "model" / "config.json"
    file.parent.mkdir()
    named = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    file.write_text(json.dumps({**named, **sizes, "rope_parameters": scaling}))
    divided = {"kind": "zero3", "context": 2, "tensor": 2, "sequence_parallel": sequence_parallel}
    check({"config": str(file)}, divided, tmp_path)
