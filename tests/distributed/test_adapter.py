"""Adapters on real processes: every kind computes what one process computes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.workers import Workers
from tests.gate import first_in_gate, in_gate
from tests.units.reduced import reduced

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")
from tests.distributed.adapter_run import local_losses, step

MODEL = reduced("llama", hidden=64, heads=4, head_dim=16, ffn=96, vocab=101, tied=False)
FP64 = {"param_dtype": "fp64", "reduce_dtype": "fp64", "master_dtype": "fp64"}
LORA = {"rank": 4, "base": "fp64"}
Case = tuple[int, dict[str, Any], dict[str, Any]]
CASES: list[Case] = [
    (2, {"kind": "ddp"}, {}),
    (2, {"kind": "ddp", "accumulate": 2}, {"targets": ["q_proj", "v_proj"]}),
    (2, {"kind": "zero1"}, {}),
    (2, {"kind": "zero2", "accumulate": 2}, {}),
    (2, {"kind": "zero3"}, {}),
    (2, {"kind": "zero3", "recompute": "full"}, {"rslora": True}),
    (2, {"kind": "zero3", "recompute": "selective"}, {}),
    (2, {"kind": "zero3", "loss": "chunked"}, {"train": ["lm_head"]}),
    (2, {"kind": "ddp", "loss": "chunked", "recompute": "full"}, {}),
    (2, {"kind": "zero3", "accumulate": 2, "grad_sync": "last"}, {"train": ["norm"]}),
    (2, {"kind": "zero3", "split_root": True}, {"train": ["embed"]}),
    (2, {"kind": "zero3"}, {"dora": True}),
    (2, {"kind": "zero2", "recompute": "full"}, {"dora": True, "targets": ["q_proj"]}),
    (2, {"kind": "zero3"}, {"rank": None, "train": ["layers.2.", "lm_head"]}),
    (2, {"kind": "zero3", "blocks_per_unit": 2}, {"targets": ["gate_proj", "lm_head"]}),
    (4, {"kind": "ddp"}, {}),
    (4, {"kind": "zero2"}, {}),
    (4, {"kind": "zero3", "accumulate": 2}, {}),
    (4, {"kind": "zero3", "shard": 2, "recompute": "full"}, {}),
    (4, {"kind": "zero2", "shard": 2, "accumulate": 2, "loss": "chunked"}, {"train": ["norm"]}),
    (4, {"kind": "zero3", "reshard_after_forward": 2}, {}),
]  # fmt: skip


# Each kind, each option of an adapter and each layout in one of them.
GATE = [CASES[number] for number in (1, 3, 5, 10, 12, 13, 18, 19)]


def case_of(strategy: dict[str, Any], adapter: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {
        "model": MODEL.model_dump(mode="json"),
        "strategy": strategy,
        "adapter": {name: value for name, value in adapter.items() if value is not None},
        **settings,
    }


def assert_equal_to_one_process(workers: Workers, processes: int, case: dict[str, Any]) -> None:
    [[alone]] = workers.run(step, 1, [{**case, "strategy": {**FP64, "kind": "single"}}])
    [ranks] = workers.run(step, processes, [case])
    assert alone["gradients"].keys() == set(alone["trained"])
    assert ranks[0]["gradients"].keys() == alone["gradients"].keys()
    for rank in ranks:
        assert abs(rank["loss"] / alone["loss"] - 1) <= 1e-12
    for name, expected in alone["gradients"].items():
        error = (ranks[0]["gradients"][name] - expected).abs().max()
        assert error <= 1e-12 * expected.abs().max(), name


@pytest.mark.parametrize(("processes", "strategy", "adapter"), in_gate(GATE, CASES), ids=str)
def test_loss_and_gradients_are_those_of_one_process(
    processes: int, strategy: dict[str, Any], adapter: dict[str, Any], workers: Workers
) -> None:
    case = case_of({**FP64, **strategy}, {**LORA, **adapter})
    assert_equal_to_one_process(workers, processes, case)


@pytest.mark.parametrize("adapter", first_in_gate(1, [{"dora": True}, {}]), ids=str)
def test_a_model_on_the_meta_device_starts_with_the_same_weights(
    adapter: dict[str, Any], workers: Workers
) -> None:
    case = case_of({**FP64, "kind": "zero3"}, {**LORA, **adapter, "train": ["norm"]}, meta=True)
    [[alone]] = workers.run(step, 1, [{**case, "strategy": {**FP64, "kind": "single"}}])
    [ranks] = workers.run(step, 2, [case])
    assert ranks[0]["loss"] == pytest.approx(alone["loss"], rel=1e-12)
    assert ranks[0]["gradients"].keys() == alone["gradients"].keys()


@pytest.mark.parametrize(
    ("processes", "strategy"),
    first_in_gate(2, [
        (2, {"kind": "zero3", "recompute": "full"}), (2, {"kind": "ddp"}),
        (2, {"kind": "zero3"}), (2, {"kind": "zero2"}), (4, {"kind": "zero3", "shard": 2}),
        (2, {"kind": "zero3", "offload": True}),
    ]),
    ids=str,
)  # fmt: skip
def test_the_loss_of_qlora_is_that_of_one_process_to_the_bit(
    processes: int, strategy: dict[str, Any], workers: Workers
) -> None:
    pytest.importorskip("torchao")
    model = reduced("llama", hidden=256, heads=4, head_dim=64, ffn=512, vocab=101, tied=False)
    case = case_of({}, {"rank": 4, "base": "nf4"}, meta=True)
    case["model"] = model.model_dump(mode="json")
    [[alone]] = workers.run(local_losses, 1, [{**case, "strategy": {"kind": "single"}}])
    [ranks] = workers.run(local_losses, processes, [{**case, "strategy": strategy}])
    assert ranks[0] == alone
