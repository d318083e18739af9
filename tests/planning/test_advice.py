"""Questions that an expert would ask: a few in the gate, all at night."""

from __future__ import annotations

import pytest

from benchmarks.advice.__main__ import Question, judge, read_questions

# One of each kind: sharding, adapters, cards, experts, stacks, batches, money.
FIRST = {"a01", "a04", "b21", "b23", "b14", "f03", "g01", "g03", "h01", "r01", "r02"}
# What an expert accepts is written down, and is not reached yet.
OPEN = {"g12", "i01", "m_llama-4-scout", "p05"}
QUESTIONS = read_questions()


@pytest.mark.parametrize(
    "question",
    [
        pytest.param(one, id=one.name, marks=() if one.name in FIRST else pytest.mark.nightly)
        for one in QUESTIONS
    ],
)
def test_no_answer_is_laughable_or_contradicts_its_table(question: Question) -> None:
    found = judge(question)
    assert not found.laughable
    assert not found.contradictions
    assert found.accepted == (question.name not in OPEN), found.misses


def test_a_judge_finds_what_is_wrong() -> None:
    """A DDP that is slower and larger, a reason and a table that disagree."""
    from benchmarks.advice.judge import contradictions, laughable

    def row(kind: str, speed: float, needed: float) -> dict[str, object]:
        axes = {"replicate": 8 if kind == "ddp" else 1, "shard": 1 if kind == "ddp" else 8}
        return {
            "strategy": {"kind": kind, "tensor": 1, "context": 1, "micro_batch": 1, **axes},
            "tokens_per_s": speed, "tokens_per_step": 8 * 4096, "step_s": 8 * 4096 / speed,
            "needed_bytes": needed, "mfu": 0.4,
        }  # fmt: skip

    winner, other = row("ddp", 100.0, 50.0), row("zero2", 103.0, 40.0)
    compared = {"kind": "compared", "strategy": other["strategy"], "throughput": 0.03}
    answer = {
        "winner": winner, "layouts": [other, winner], "pareto": [], "rejected": [],
        "why": [compared],
        "limit_bytes": 100, "slack": {"memory_bytes": 50, "network_factor": None}, "fitted": True,
        "job": {"seq_len": 4096}, "objective": "throughput", "warnings": [],
        "comparison_interval": [-0.05, 0.05],
    }  # fmt: skip
    assert any("DDP" in one for one in laughable(answer))
    assert not list(contradictions(answer))
    compared["throughput"] = 0.05
    assert any("the table says" in one for one in contradictions(answer))
