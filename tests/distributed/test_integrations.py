"""Loops of others, watched: the examples run as they are, and predictions meet what happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.command import ROOT
from tests.distributed.launch import results, torchrun

pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytest.importorskip("transformers")

pytestmark = pytest.mark.nightly

# Of all examples: a Llama of 4 blocks, untied, in fp32.
HIDDEN, FFN, VOCAB, LAYERS = 128, 352, 256, 4
BLOCK = 4 * HIDDEN**2 + 3 * HIDDEN * FFN + 2 * HIDDEN
PARAMETERS = LAYERS * BLOCK + 2 * VOCAB * HIDDEN + HIDDEN
# Tensors: 9 of a block, two tables, the last norm.
TENSORS = 9 * LAYERS + 3


def run(example: str, folder: Path, *words: str, **variables: Any) -> dict[str, Any]:
    script = (str(ROOT / "tests/distributed/integrations_run.py"), str(ROOT / "examples" / example))
    shown = torchrun(2, *script, *words, folder=folder, **variables)
    assert "Collectives per step" in shown
    return results(shown)[0]


def traffic(profile: dict[str, Any]) -> dict[tuple[str, int], tuple[int, int]]:
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for one in profile["traffic"]:
        key = (one["op"], one["group_size"])
        calls, size = found.get(key, (0, 0))
        found[key] = (calls + one["calls"], size + one["bytes"])
    return found


def check(
    found: dict[str, Any], beside: dict[tuple[str, int], tuple[int, int]] | None = None
) -> dict[tuple[str, int], tuple[int, int]]:
    """Collectives exact, memory within a few percent; returns what was measured of the former.

    `beside` is what a loop sends of its own, and nobody predicts.
    """
    predicted, measured = found["predicted"], found["measured"]
    assert {**traffic(predicted), **(beside or {})} == traffic(measured)
    peaks = [one["memory"]["peak_allocated_bytes"] for one in (predicted, measured)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.03)
    assert predicted["model"]["parameters"] == PARAMETERS
    # 2 processes x 2 micro-batches of 4 x 64 tokens.
    assert measured["work"]["tokens"] == 2 * 2 * 4 * 64
    rate = measured["throughput"]["tokens_per_s"]
    assert rate == pytest.approx(measured["work"]["tokens"] / measured["time"]["step_s"])
    return traffic(measured)


def test_the_trainer_replicates_on_cpus(tmp_path: Path) -> None:
    found = run("trainer_callback.py", tmp_path)
    moved = check(found)
    # Gradients of all parameters, and a map of those used, which DDP asks for by default there.
    assert moved["all_reduce", 2][1] == 4 * PARAMETERS + 4 * TENSORS
    logs = found["history"]
    rates = [line["shardwise/tokens_per_s"] for line in logs if "shardwise/tokens_per_s" in line]
    # Of 4, 8, 12 and 16 steps, the first four are still measured.
    assert len(rates) == 3
    assert min(rates) > 0
    # The Trainer's own lines are as many as ever.
    assert len([line for line in logs if "loss" in line]) == 4


def test_the_trainer_shards(tmp_path: Path) -> None:
    moved = check(run("trainer_callback.py", tmp_path, "fsdp2"))
    # 4 blocks and the embeddings twice in each of 2 micro-batches, norm and head once.
    assert moved["all_gather", 2] == (
        2 * (2 * (LAYERS + 1) + 1),
        2 * 4 * (2 * PARAMETERS - VOCAB * HIDDEN - HIDDEN),
    )
    # Reduced with the last micro-batch only: all three kinds of units.
    assert moved["reduce_scatter", 2] == (LAYERS + 2, 4 * PARAMETERS)
    assert moved["all_reduce", 2] == (1, 4 * TENSORS)


@pytest.mark.parametrize("reshard", ["true", "false"])
def test_a_loop_of_accelerate_shards(reshard: str, tmp_path: Path) -> None:
    moved = check(run("accelerate_loop.py", tmp_path, "fsdp2", RESHARD=reshard))
    again = LAYERS + 1 if reshard == "true" else 0
    assert moved["all_gather", 2][0] == 2 * (LAYERS + 2 + again)


def test_a_loop_of_accelerate_replicates(tmp_path: Path) -> None:
    moved = check(run("accelerate_loop.py", tmp_path))
    assert moved["all_reduce", 2][1] == 4 * PARAMETERS
    # Two tables of rotary frequencies, once a step.
    assert moved["broadcast", 2] == (1, 2 * 4 * (HIDDEN // 4 // 2))


def test_lightning_shards(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    found = run("lightning_callback.py", tmp_path)
    moved = check(found, beside={("broadcast", 2): (1, 8)})
    # Lightning reduces every micro-batch; blocks are gathered twice, the root once.
    assert moved["all_gather", 2][0] == 2 * (2 * LAYERS + 1)
    assert moved["reduce_scatter", 2] == (2 * (LAYERS + 1), 2 * 4 * PARAMETERS)
    assert found["metrics"]["shardwise/tokens_per_s"] > 0
