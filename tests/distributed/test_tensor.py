"""Tensor parallelism trains what one process does: six steps in fp64, against one process."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.distributed.workers import Workers
from tests.gate import in_gate
from tests.units.reduced import reduced

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.distributed.against_one import MODELS, Alone, Settings
from tests.distributed.tensor_run import digests_of_undivided, traffic_of_norm

Example = tuple[int, str, Settings]


def example(processes: int, model: str, kind: str, **settings: Any) -> Example:
    return processes, model, {"kind": kind, "tensor": 2, **settings}


# Each kind, layout and way to divide a norm once, and what most families do not have.
EXAMPLES = [
    # Shard x tensor: 2 x 2.
    example(4, "llama", "zero3"),
    # Kinds, recompute and accumulation.
    example(4, "tied", "zero2", accumulate=2, recompute="full", sequence_parallel=False),
    example(4, "qwen3", "zero3", recompute="full", packed=True),
    example(4, "odd vocabulary", "zero3", split_root=True, recompute=0.5, meta=True),
    example(4, "phi", "ddp", sequence_parallel=False, recompute="selective"),
]
# Families, each with and without sequence parallelism.
FAMILIES = [
    example(2, model, "zero3", sequence_parallel=sequence, packed=packed)
    for model in ("gemma3_text", "olmo", "phi", "mistral", "qwen2", "qwen3", "gemma")
    for sequence, packed in ((True, True), (False, False))
]
MORE = [
    # 1 x 4, 1 x 2, 4 x 1, and a tensor group on several nodes.
    example(4, "four kv heads", "zero3", tensor=4),
    example(2, "llama", "zero3"),
    example(4, "llama", "zero3", tensor=1),
    example(4, "llama", "zero3", tensor_across_nodes=True, sequence_parallel=False),
    example(4, "llama", "zero1", accumulate=2, recompute="selective"),
    example(4, "tied", "zero3", accumulate=2, recompute="selective"),
    example(4, "tied", "ddp", accumulate=2, recompute="full"),
    example(2, "gpt_neox", "zero3"),
    example(8, "llama", "zero3", shard=2, accumulate=2),
]
GATE = [*EXAMPLES, FAMILIES[0]]


@pytest.fixture(scope="module")
def alone(workers: Workers) -> Alone:
    return Alone(workers)


@pytest.mark.parametrize(
    ("processes", "model", "settings"),
    in_gate(GATE, [*EXAMPLES, *FAMILIES, *MORE]),
    ids=str,
)
def test_processes_train_what_one_does(
    processes: int, model: str, settings: Settings, alone: Alone
) -> None:
    alone.assert_same(processes, model, settings)


def test_processes_of_a_tensor_group_drop_the_same(workers: Workers) -> None:
    """Otherwise what each has whole, such as a norm, would differ after a step."""
    spec = reduced("phi", layers=2, hidden=64, heads=4, head_dim=16, ffn=96, vocab=104, dropout=0.2)
    strategy = {"kind": "ddp", "tensor": 2, "sequence_parallel": False, "param_dtype": "fp32"}
    case = {"model": spec.model_dump(mode="json"), "strategy": strategy}
    [(one, other)] = workers.run(digests_of_undivided, 2, [case])
    assert one == other
    assert len(one) == 2 * 2 + 2


@pytest.mark.parametrize(
    ("model", "sequence_parallel", "kind"),
    in_gate(
        [("qwen3", True, "zero3"), ("olmo", False, "ddp")],
        [*product(("qwen3", "olmo"), (True, False), ("zero3", "ddp"))],
    ),
)
def test_the_norm_communicates_as_predicted(
    model: str, sequence_parallel: bool, kind: str, workers: Workers
) -> None:
    """Norms of heads are on the mesh of divided layers; Olmo has no other norms."""
    strategy = {"kind": kind, "tensor": 2, "sequence_parallel": sequence_parallel}
    case = {
        "model": MODELS[model].model_dump(mode="json"),
        "strategy": {"param_dtype": "fp32", **strategy},
    }
    [ranks] = workers.run(traffic_of_norm, 4, [case])
    for counted, predicted in ranks:
        assert counted == predicted
        assert "all_reduce/2/tensor" in counted
