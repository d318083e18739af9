"""Context parallelism trains what one process does: six steps in fp64, against one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.workers import Workers
from tests.gate import in_gate

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.distributed.against_one import MODELS, Alone, Settings
from tests.distributed.ring_run import ring

Example = tuple[int, str, Settings]


def example(processes: int, model: str, kind: str, **settings: Any) -> Example:
    return processes, model, {"kind": kind, "context": 2, **settings}


EXAMPLES = [
    # Layouts of shard x context x tensor: 2 x 2, 1 x 4, 1 x 2 x 2.
    example(4, "llama", "zero3", packed=True),
    # Twice as many processes as kv heads.
    example(4, "llama", "zero3", context=4, packed=True, recompute="full"),
    # One kv head on each process of a tensor group, two processes in its context group.
    example(4, "llama", "zero3", tensor=2, sequence_parallel=False, packed=True),
    # Windows shorter than a part of the sequence.
    example(2, "mistral", "zero3", packed=True, recompute="selective"),
    example(2, "qwen2", "zero3", loss="chunked", loss_chunks=3),
]
MORE = [
    example(2, "llama", "zero3"),
    example(4, "tied", "zero3", context=4, accumulate=2),
    example(4, "tied", "zero3", tensor=2, accumulate=2, recompute="selective"),
    example(4, "odd vocabulary", "zero2", tensor=2, tensor_across_nodes=True, meta=True),
    example(4, "qwen3", "zero3", replicate=2, accumulate=2, recompute="selective"),
    example(4, "phi", "zero1", tensor=2, accumulate=2, recompute="full"),
    example(4, "mistral", "zero3", tensor=2),
    example(4, "gemma3_text", "zero3", tensor=2, packed=True),
    # Shard x context x tensor: 2 x 2 x 2.
    example(8, "llama", "zero3", tensor=2, packed=True, accumulate=2),
]


@pytest.fixture(scope="module")
def alone(workers: Workers) -> Alone:
    return Alone(workers)


@pytest.mark.parametrize(
    ("processes", "model", "settings"),
    in_gate(EXAMPLES, [*EXAMPLES, *MORE]),
    ids=str,
)
def test_processes_train_what_one_does(
    processes: int, model: str, settings: Settings, alone: Alone
) -> None:
    alone.assert_same(processes, model, settings)


@pytest.mark.parametrize(
    ("processes", "balanced", "rotate"),
    in_gate(
        [(4, True, "allgather"), (4, False, "alltoall")],
        [
            (processes, balanced, rotate)
            for processes, balanced in ((2, True), (4, True), (4, False))
            for rotate in ("allgather", "alltoall")
        ],
    ),
)
def test_ring_attention_of_torch(
    processes: int, balanced: bool, rotate: str, workers: Workers
) -> None:
    """Gradients of whole sequences, with the calls and bytes that are predicted for a GPU."""
    spec, batch, seq_len = MODELS["llama"], 2, 32
    case = {"model": spec.model_dump(mode="json"), "batch": batch, "seq_len": seq_len,
            "rotate": rotate, "balanced": balanced}  # fmt: skip
    [ranks] = workers.run(ring, processes, [case])
    # Keys and values of a part, in fp64; every head has its own, as the kernel has no groups.
    part = 2 * batch * seq_len // processes * spec.heads * spec.head_dim * 8
    blocks = spec.layers
    gathered = (blocks, blocks * processes * part)
    forward, backward = ({"all_gather": gathered} for _ in range(2))
    turns = blocks * (processes - 1)
    if rotate == "alltoall":
        forward, backward = {"all_to_all": (turns, turns * part)}, {}
    # Their gradients go round the whole ring, and the keys and values once more.
    back = blocks * processes + (turns if rotate == "alltoall" else 0)
    backward["all_to_all"] = (back, back * part)
    for found in ranks:
        assert found["error"] <= 1e-12
        assert (found["forward"], found["backward"]) == (forward, backward)
