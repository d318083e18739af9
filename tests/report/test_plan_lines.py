"""The screen of a plan has at most 30 lines of 80 columns, whatever is to be told."""

from __future__ import annotations

import pytest

from shardwise.report.plan import LINES
from tests.command import shardwise
from tests.gate import first_in_gate

BUDGET = "--tokens 1T --price 2.5 --deadline"
H100, RTX = "--cluster 2x8xH100-SXM@400Gbps", "--cluster 8x8xRTX-4090@100Gbps"
EXPERTS = "--model mixtral-8x7b --adapter qlora:16 --seq-len 8000"
STORED = "--model qwen3-30b-a3b --adapter qlora:16"
LORA = "--model llama-3-8b --adapter lora:16 --seq-len 16000"
# What a plan is asked for, and parts of the answer that nothing may push out.
CASES = [
    # Six warnings, an adapter and a budget.
    (f"{EXPERTS} {RTX} --tokens 1B --price 0.4 --deadline 1", 2),
    # A budget, a deadline that is missed, and the longest of the commands of a stack.
    (f"--model llama-3-8b {H100} --for kubernetes {BUDGET} 1", 2),
    # Nothing fits, and all that could be told of it.
    ("--model llama-3-8b --cluster 8xRTX-4090 --seq-len 16000", 1),
    (f"--model llama-3-8b --cluster 8x8xH100-SXM@100Gbps --objective money {BUDGET} 30", 2),
    (f"--model llama-3-8b {H100} --for megatron-bridge {BUDGET} 0.1", 2),
    (f"--model llama-3-8b {H100} --for torchtitan {BUDGET} 0.1", 2),
    (f"{LORA} {H100} --for trl {BUDGET} 0.1", 2),
    (f"{LORA} {H100} --for llama-factory {BUDGET} 0.1", 2),
    (f"{STORED} --seq-len 2000 {RTX} {BUDGET} 5", 2),
    (f"--model gpt2 --seq-len 1000 --global-batch 576000 --exact-batch {RTX} {BUDGET} 1", 2),
    ("--model mixtral-8x7b --adapter qlora:16 --cluster 8xRTX-4090 --seq-len 16384", 2),
    # Too much for bars.
    (f"{STORED} --seq-len 2000 {RTX} --for axolotl {BUDGET} 5", 0),
]


@pytest.mark.parametrize(("asked", "bars"), first_in_gate(3, CASES))
def test_a_plan_has_at_most_30_lines_of_80_columns(asked: str, bars: int) -> None:
    lines = shardwise("plan", *asked.split()).stdout.splitlines()
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= 80
    drawn = [
        line for line in lines if len(line.strip()) > 70 and set(line.strip()) <= set("█▒▓░▚▪·|")
    ]
    assert len(drawn) == bars
    first, *rest = (line for line in lines if line.startswith(("Recommended", "No configuration")))
    assert not rest
    assert first.startswith("No configuration") or any(line.startswith("Next: ") for line in lines)
