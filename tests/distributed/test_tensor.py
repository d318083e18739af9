"""Tensor parallelism trains what one process does: six steps in fp64, against one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.workers import Workers
from tests.units.reduced import reduced

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.distributed.against_one import MODELS, Alone, Settings
from tests.distributed.tensor_run import digests_of_undivided, traffic_of_norm

Example = tuple[int, str, Settings]


def example(processes: int, model: str, kind: str, **settings: Any) -> Example:
    return processes, model, {"kind": kind, "tensor": 2, **settings}


EXAMPLES = [
    # Layouts of shard x tensor: 1 x 2, 2 x 2, 1 x 4, 4 x 1.
    example(2, "llama", "zero3"),
    example(4, "llama", "zero3"),
    example(4, "four kv heads", "zero3", tensor=4),
    example(4, "llama", "zero3", tensor=1),
    example(4, "llama", "zero3", tensor_across_nodes=True, sequence_parallel=False),
    # Kinds, recompute and accumulation.
    example(4, "llama", "zero1", accumulate=2, recompute="selective"),
    example(4, "tied", "zero2", accumulate=2, recompute="full", sequence_parallel=False),
    example(4, "tied", "zero3", accumulate=2, recompute="selective"),
    example(4, "qwen3", "zero3", recompute="full", packed=True),
    example(4, "odd vocabulary", "zero3", split_root=True, recompute=0.5, meta=True),
    example(4, "tied", "ddp", accumulate=2, recompute="full"),
    example(4, "phi", "ddp", sequence_parallel=False, recompute="selective"),
    example(2, "gpt_neox", "zero3"),
    # Families.
    *(
        example(2, model, "zero3", sequence_parallel=sequence, packed=packed)
        for model in ("mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "olmo", "phi")
        for sequence, packed in ((True, True), (False, False))
    ),
]
HYBRID = example(8, "llama", "zero3", shard=2, accumulate=2)


@pytest.fixture(scope="module")
def alone(workers: Workers) -> Alone:
    return Alone(workers)


@pytest.mark.parametrize(
    ("processes", "model", "settings"),
    [*EXAMPLES, pytest.param(*HYBRID, marks=pytest.mark.nightly)],
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


@pytest.mark.parametrize("kind", ["zero3", "ddp"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("model", ["qwen3", "olmo"])
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
