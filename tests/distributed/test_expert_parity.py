"""Expert parallelism trains what one process does: six steps in fp64, with clipping.

Every family divides its experts in every layout, among them those with replicas, with tokens spread
as they are drawn, most of them on one process, or none on half of the processes.
"""

from __future__ import annotations

from functools import cache
from itertools import cycle
from typing import Any

import pytest

from tests.distributed.workers import Workers
from tests.gate import first_in_gate, in_gate

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.distributed.expert_models import FAMILIES
from tests.distributed.expert_run import train

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"expert": 2}),
    (2, {"shard": 1, "context": 2, "expert": 2}),
    (4, {"expert": 2}),
    (4, {"expert": 4}),
    (4, {"shard": 2, "expert": 2}),  # with 2 replicas
    (4, {"shard": 1, "context": 2, "expert": 2}),  # with 2 replicas
    (4, {"context": 2, "expert": 2}),
    (4, {"context": 2, "expert": 4}),
]
SETTINGS: list[dict[str, Any]] = [
    {"kind": "zero3"},
    {"kind": "zero2", "accumulate": 2},
    {"kind": "zero3", "recompute": "full", "accumulate": 2},
    {"kind": "zero1", "accumulate": 2},
    {"kind": "zero3", "recompute": "selective"},
    {"kind": "zero3", "blocks_per_unit": 2, "prefetch": 2},
    {"kind": "zero2", "recompute": 0.5},
]
ROUTINGS = ("drawn", "skewed", "starved")
# Its attention has sinks, which fused attention has not.
WITHOUT_CONTEXT = ("gpt_oss",)


def _cases() -> list[tuple[int, str, str, dict[str, Any]]]:
    """Every family in every layout; settings and routings take turns, of which 7 and 3 differ."""
    turns = zip(cycle(SETTINGS), cycle(ROUTINGS), strict=False)
    return [
        (processes, family, routing, {**settings, **layout})
        for _ in range(2)
        for processes, layout in LAYOUTS
        for family in FAMILIES
        if "context" not in layout or family not in WITHOUT_CONTEXT
        for settings, routing in [next(turns)]
    ]


GATE: list[tuple[int, str, str, dict[str, Any]]] = [
    (2, "mixtral", "starved", {"kind": "zero3", "expert": 2}),
    (4, "gpt_oss", "skewed", {"kind": "zero2", "shard": 2, "expert": 2, "accumulate": 2}),
    (4, "deepseek_v3", "drawn", {"kind": "zero3", "context": 2, "expert": 2, "recompute": "full"}),
]
CASES = [*GATE, *_cases()]


@pytest.fixture(scope="module")
def alone(workers: Workers) -> Any:
    """The same training on one process, by family and routing."""

    @cache
    def trained(family: str, routing: str) -> dict[str, Any]:
        return run(workers, 1, family, routing, {"kind": "single"})

    return trained


def run(
    workers: Workers,
    processes: int,
    family: str,
    routing: str,
    strategy: dict[str, Any],
    **more: Any,
) -> dict[str, Any]:
    case = {"family": family, "routing": routing, "strategy": strategy, "clip": 0.5, **more}
    [ranks] = workers.run(train, processes, [case])
    found: dict[str, Any] = ranks[0]
    return found


@pytest.mark.parametrize(
    ("processes", "family", "routing", "strategy"), in_gate(GATE, CASES), ids=str
)
def test_divided_experts_train_as_one_process(
    processes: int,
    family: str,
    routing: str,
    strategy: dict[str, Any],
    workers: Workers,
    alone: Any,
) -> None:
    expected = alone(family, routing)
    found = run(workers, processes, family, routing, strategy)
    assert found["first"] == expected["first"]
    pairs = zip(found["last"], expected["last"], strict=True)
    assert max(abs(a - b) for a, b in pairs) <= 1e-12
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-12)
    # Clipped, not just measured.
    assert min(expected["norms"]) > 0.5
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    assert found["first"] != found["last"]
    assert found["norm_traffic"] == found["predicted_norm_traffic"] != {}


BALANCED: list[tuple[int, str, dict[str, Any]]] = [
    (4, "mixtral", {"kind": "zero3", "shard": 2, "expert": 2}),
    (4, "qwen3_moe", {"kind": "zero3", "context": 2, "expert": 4, "recompute": "full"}),
    (2, "gpt_oss", {"kind": "zero2", "expert": 2}),
    (2, "olmoe", {"kind": "zero3", "expert": 2, "loss": "chunked"}),
    # Not divided, but sharded.
    (4, "olmoe", {"kind": "zero3"}),
]


@pytest.mark.parametrize(("processes", "family", "strategy"), first_in_gate(1, BALANCED), ids=str)
def test_the_auxiliary_loss_is_one_over_the_global_batch(
    processes: int, family: str, strategy: dict[str, Any], workers: Workers
) -> None:
    """One process has all tokens, so its own shares are the global ones."""
    more = {"config": {"router_aux_loss_coef": 0.5}}
    alone = run(workers, 1, family, "skewed", {"kind": "single"}, balance_loss="local", **more)
    without = run(workers, 1, family, "skewed", {"kind": "single"}, **more)
    found = run(workers, processes, family, "skewed", strategy, balance_loss="global", **more)
    pairs = zip(found["last"], alone["last"], strict=True)
    assert max(abs(a - b) for a, b in pairs) <= 1e-12
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-12)
    # Six steps, each with a loss of at least its coefficient.
    assert alone["loss"] > without["loss"] + 6 * 0.4
