"""`shardwise doctor`: passes what is sound, and names what is not, with what to change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command import ROOT, shardwise
from tests.distributed.runs import FOREIGN, write

pytest.importorskip("torch")
pytest.importorskip("transformers")


def examine(file: Path, code: int) -> dict[str, dict[str, Any]]:
    words = ("doctor", str(file), "--json")
    done = shardwise(*words, folder=file.parent)
    assert done.returncode == code, done.stdout + done.stderr
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "strategy",
    [
        'strategy = "hsdp"',
        'strategy = { kind = "ddp" }',
        'strategy = "zero2"',
    ],
)
def test_a_sound_run_passes(tmp_path: Path, strategy: str) -> None:
    # GPT-2 ties its embedding to its head; four nodes of two make hybrid sharding hybrid.
    file = tmp_path / "run.toml"
    file.write_text(f'model = "gpt2"\ncluster = "4x2xH100-SXM@400Gbps"\n{strategy}\n')
    checks = examine(file, 0)
    assert {name for name, check in checks.items() if check["passed"] is not True} == set()
    assert len(checks) == 10
    assert "wte" in checks["tied weights stay tied"]["detail"]
    assert "bf16" in checks["dtypes as declared"]["detail"]


# A configuration that the formulas do not know, checked as it is.
OLMOE = {
    "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "hidden_size": 64,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 503,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["mixtral-8x7b", "qwen3-30b-a3b", "olmoe/config.json"])
def test_a_mixture_of_experts_passes(tmp_path: Path, model: str) -> None:
    (tmp_path / "olmoe").mkdir()
    (tmp_path / "olmoe" / "config.json").write_text(json.dumps(OLMOE))
    file = tmp_path / "run.toml"
    file.write_text(f'model = "{model}"\ncluster = "8x8xH100-SXM@400Gbps"\nstrategy = "zero3"\n')
    checks = examine(file, 0)
    assert {name for name, check in checks.items() if check["passed"] is not True} == set()
    assert checks["equal to one process"]["passed"]


def test_experts_are_compared_in_fp64() -> None:
    """Grouped products of experts take bf16 only; what doctor builds must not use them."""
    import torch

    from shardwise.engine.materialize import Materializer
    from shardwise.spec.lookup import find_model
    from shardwise.spec.strategy import Strategy
    from shardwise.trials.doctor.run import build_exact, reduced

    small = reduced(find_model("mixtral-8x7b"), Strategy(kind="zero3"))
    assert small is not None
    module = build_exact(small)
    Materializer(module, torch.device("cpu"), torch.float64).unit([module])
    logits = module(torch.arange(32).reshape(2, 16)).logits
    logits.square().mean().backward()
    assert logits.dtype == torch.float64
    # Experts that no token chose have a gradient of zero, not none.
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("llama-3-8b", '[adapter]\nrank = 8\nbase = "nf4"\ndropout = 0.1'),
        ("llama-3-8b", '[adapter]\nrank = 8\ntrain = ["norm"]'),
        ("tests.distributed.peft_run:fp32_base", ""),
    ],
)
def test_a_sound_run_with_adapters_passes(tmp_path: Path, model: str, more: str) -> None:
    pytest.importorskip("peft")
    file = tmp_path / "run.toml"
    file.write_text(f'model = "{model}"\ncluster = "8xH100-SXM"\nstrategy = "zero3"\n{more}\n')
    checks = examine(file, 0)
    assert {name for name, check in checks.items() if check["passed"] is not True} == set()
    # Four more than of a model that is trained in full.
    assert len(checks) == 14
    assert "bytes of parameters per rank" in checks["sharded as planned"]["detail"]
    assert "equal the prediction" in checks["collectives as predicted"]["detail"]
    # Two adapters of each adapted layer of three blocks, and norms; nothing that is frozen.
    tensors = {"nf4": 42, "norm": 49, "": 12}[next(k for k in ("nf4", "norm", "") if k in more)]
    states = checks["optimizer states as sharded"]["detail"]
    assert states == f"states of {tensors} trained tensors"


def test_what_is_wrong_is_named_with_what_to_change(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'model = "llama-3-70b"\ncluster = "8x8xH100-SXM"\nstrategy = "zero2"\n'
        'job = { seq_len = 4096, global_batch = 1_000_000 }\ndata = { path = "gone.jsonl" }\n'
    )
    checks = examine(file, 1)
    failed = {name: check["detail"] for name, check in checks.items() if check["passed"] is False}
    assert failed.keys() == {"memory headroom", "batch divides", "data readable"}
    assert "try --" in failed["memory headroom"]
    assert "1,048,576" in failed["batch divides"]
    assert "gone.jsonl" in failed["data readable"]


@pytest.mark.nightly
def test_ranks_with_unequal_data(tmp_path: Path) -> None:
    file = write(tmp_path, FOREIGN, source="unequal", accumulate=2)
    file.write_text(file.read_text().replace("steps = 10", "steps = 3"))
    # Equal over the first two steps, which is as far as it looks; but the model breaks on a token.
    checks = examine(file, 1)
    assert checks["equal micro-batch counts"]["passed"]
    assert not checks["equal to one process"]["passed"]
    file.write_text(file.read_text().replace("sources:unequal", "sources:missing"))
    assert "cannot import" in examine(file, 1)["equal micro-batch counts"]["detail"]


@pytest.mark.nightly
def test_the_screen(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "hf_model.toml")
    done = shardwise("doctor", example, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = done.stdout.splitlines()
    assert all(len(line) <= 80 for line in shown)
    assert shown[-1].startswith("Ready to train: 10 checks passed")
