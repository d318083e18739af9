"""The chunked loss on real processes: the gradients of the plain loss, and less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.runs import losses, write
from tests.distributed.workers import Workers
from tests.gate import first_in_gate
from tests.units.reduced import reduced

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.distributed.loss_run import compare, peak
from tests.distributed.train_run import run_toml

SMALL: dict[str, Any] = {"hidden": 64, "head_dim": 16, "ffn": 96, "vocab": 101}
MODELS = {
    "untied": reduced("llama", **SMALL, tied=False),
    "tied": reduced("llama", **SMALL, tied=True),
    "gemma2": reduced("gemma2", **SMALL),
    "mpt": reduced("mpt", **SMALL),
    "opt": reduced("opt", **SMALL),
}
_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 101,
          "num_key_value_heads": 2, "intermediate_size": 96, "pad_token_id": 0}  # fmt: skip
SCALED = {
    "granite": {"model_type": "granite", **_SIZES, "logits_scaling": 7.0},
    "cohere": {"model_type": "cohere", **_SIZES, "logit_scale": 0.25},
}
FP64 = {"param_dtype": "fp64", "reduce_dtype": "fp64", "master_dtype": "fp64"}
Case = tuple[int, str, dict[str, Any]]
# Each rank has 51 tokens a micro-batch: 8 chunks do not divide them, 100 are more than there are.
GATE: list[Case] = [
    (2, "tied", {"kind": "ddp", "accumulate": 2}),
    (2, "untied", {"kind": "ddp", "accumulate": 1}),
    (2, "untied", {"kind": "zero1", "accumulate": 2}),
    (2, "untied", {"kind": "zero3", "recompute": "full", "loss_chunks": 100}),
    (2, "tied", {"kind": "zero3", "recompute": "selective", "loss_chunks": 3}),
    (4, "untied", {"kind": "zero2", "shard": 2, "accumulate": 2, "grad_sync": "last"}),
]
# A soft cap of logits, scales of logits, and a decoder inside another module.
GATE += [(2, model, {"kind": "zero3"}) for model in ("gemma2", "granite", "cohere", "mpt", "opt")]
EXACT = GATE + [
    case
    for model in ("tied", "untied")
    for kind in ("ddp", "zero1", "zero2", "zero3")
    for accumulate in (1, 2)
    if (case := (2, model, {"kind": kind, "accumulate": accumulate})) not in GATE
]
EXACT += [
    (1, "tied", {"kind": "single", "accumulate": 2}),
    (2, "untied", {"kind": "zero3", "blocks_per_unit": 2, "prefetch": 2}),
    (4, "tied", {"kind": "zero3", "shard": 2, "accumulate": 2}),
    (4, "untied", {"kind": "zero3", "reshard_after_forward": 2}),
]


def case_of(model: str, strategy: dict[str, Any], **settings: Any) -> dict[str, Any]:
    if model in SCALED:
        return {"config": SCALED[model], "strategy": strategy, **settings}
    attention = None if model in ("gemma2", "mpt") else "sdpa"
    dumped = MODELS[model].model_dump(mode="json")
    return {"model": dumped, "strategy": strategy, "attention": attention, **settings}


@pytest.mark.parametrize(
    ("processes", "model", "strategy"), first_in_gate(len(GATE), EXACT), ids=str
)
def test_loss_and_gradients_are_those_of_the_plain_loss(
    processes: int, model: str, strategy: dict[str, Any], workers: Workers
) -> None:
    [ranks] = workers.run(compare, processes, [case_of(model, {**FP64, **strategy})])
    for found in ranks:
        assert found["loss"] <= 1e-12
        assert found["gradient"] <= 1e-12


@pytest.mark.parametrize("settings", [{"meta": True}, {"head_unit": True}], ids=str)
def test_a_model_on_the_meta_device_and_a_head_that_is_a_unit(
    settings: dict[str, Any], workers: Workers
) -> None:
    case = case_of("untied", {**FP64, "kind": "zero3"}, **settings)
    [ranks] = workers.run(compare, 2, [case])
    assert max(value for found in ranks for value in found.values()) <= 1e-12


@pytest.mark.parametrize(
    ("model", "kind"),
    first_in_gate(2, [("tied", "ddp"), ("untied", "zero3"), ("tied", "zero3"), ("untied", "ddp")]),
)
def test_bf16(kind: str, model: str, workers: Workers) -> None:
    """DDP by autocast, which keeps fp32 weights; zero3 with weights in bf16."""
    [ranks] = workers.run(compare, 2, [case_of(model, {"kind": kind})])
    for found in ranks:
        assert found["loss"] <= 1e-3
        assert found["gradient"] <= 2e-2


@pytest.mark.parametrize(
    ("kind", "dtype"),
    first_in_gate(2, [("ddp", "bf16"), ("zero3", "fp32"), ("ddp", "fp32"), ("zero3", "bf16")]),
)
def test_logits_take_an_eighth_of_the_memory(kind: str, dtype: str, workers: Workers) -> None:
    """With a vocabulary that outweighs everything else; measured, with what the chunks add.

    The plain loss holds logits, their logarithms and the gradient of the logits, in fp32. The
    chunked loss holds those of a chunk, and two gradients of the head.
    """
    vocab, seq_len, hidden = 8192, 512, 32
    spec = reduced("llama", layers=2, hidden=hidden, heads=2, head_dim=16, ffn=64, vocab=vocab,
                   max_positions=seq_len, tied=False)  # fmt: skip
    found = {}
    for loss in ("plain", "chunked"):
        strategy = {"kind": kind, "param_dtype": dtype, "loss": loss}
        case = {"model": spec.model_dump(mode="json"), "strategy": strategy, "seq_len": seq_len}
        [ranks] = workers.run(peak, 2, [case])
        found[loss] = ranks[0]
    logits = 4 * seq_len * vocab
    # Without the model's other tensors, which are alive at either peak.
    saved = found["plain"] - found["chunked"]
    assert saved >= 3 * logits * (1 - 2 / 8)
    head = 4 * vocab * hidden
    assert saved >= 3 * logits * (1 - 1 / 8) - 3 * head


# In the gate test_chat.py resumes with this loss.
@pytest.mark.nightly
def test_a_resumed_run_has_the_same_losses(tmp_path: Path, workers: Workers) -> None:
    strategy = 'loss = "chunked"\nloss_chunks = 5'
    train = 'checkpoint = { every = 4 }\nschedule = "constant"\nmeasure = false'
    for name, ends in (("whole", (8,)), ("resumed", (4, 8))):
        folder = tmp_path / name
        folder.mkdir()
        for steps in ends:
            file = write(folder, steps=steps, log_every=1, strategy=strategy, train=train)
            [ranks] = workers.run(run_toml, 2, [{"file": str(file)}])
            assert [rank["steps"] for rank in ranks] == [steps] * 2
    assert len(losses(tmp_path / "whole")) == 8
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")
