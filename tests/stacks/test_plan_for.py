"""`plan --for STACK`: plans that the stack runs as they are, with the same figures."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.planning.api import plan_run
from shardwise.planning.problem import Problem
from shardwise.planning.reasons.limits import Alternative
from shardwise.planning.reasons.warnings import OnlyReplicated
from shardwise.planning.search import Search
from shardwise.planning.space import Space
from shardwise.predict.api import estimate_run
from shardwise.spec.job import Job
from shardwise.spec.lookup import find_cluster, find_model
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.stacks.limits import StackLimits
from shardwise.stacks.read.imports import import_file
from shardwise.stacks.write.differences import changed_fields
from shardwise.stacks.write.exports import (
    STACKS,
    applied_strategy,
    export_run,
    shards_along_rows,
)
from tests.examples import examples
from tests.stacks.runs import large

# Stacks whose written file says everything about the strategy that their script does not.
READ_BACK = ("accelerate", "trainer", "deepspeed", "torchtitan", "trl", "axolotl", "llama-factory")
# Fields that the user's script sets, by stack.
BY_SCRIPT = {
    "accelerate": {"micro_batch", "accumulate", "recompute"},
    "trainer": {"shard", "replicate", "tensor", "sequence_parallel", "context", "context_method"},
    "deepspeed": {"recompute", "compile"},
    "torchtitan": set(),
    "trl": set(),
    "axolotl": set(),
    "llama-factory": {"shard", "replicate"},
}

PROBLEMS = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["llama-3.2-1b", "llama-3-8b"]),
        "cluster": st.sampled_from(
            ["8xRTX-4090", "2x4xA100-40GB@25Gbps", "2x8xH100-SXM@400Gbps", "1xH100-SXM"]
        ),
        "seq_len": st.sampled_from([512, 2048]),
        "global_batch": st.sampled_from([None, "256Ki"]),
        "precision": st.sampled_from(["bf16", "fp32"]),
    }
)


def read_back(run: RunSpec, stack: str) -> Strategy:
    """The strategy that is read from the file the stack is given, with what the script sets."""
    written = export_run(run, stack)
    with TemporaryDirectory() as folder:
        file = Path(folder) / written.name
        file.write_text(written.text)
        fields = dict(import_file(file).strategy)
    fields |= {name: getattr(run.strategy, name) for name in BY_SCRIPT[stack]}
    if run.strategy.kind == "single":
        fields["kind"] = "single"  # one process, which the launcher decides
    return Strategy.read(fields).resolve(run.cluster.devices, run.cluster.devices_per_node)


@given(PROBLEMS, st.sampled_from(STACKS))
@examples(16)
def test_a_plan_for_a_stack_is_run_by_it_as_planned(problem: dict[str, Any], stack: str) -> None:
    found, run = plan_run(**problem, for_stack=stack)
    if run is None:
        return
    written = export_run(run, stack)
    assert changed_fields(run.strategy, written.applied) == {}
    if stack in READ_BACK:
        assert changed_fields(run.strategy, read_back(run, stack)) == {}
    there = estimate_run(run._replace(strategy=written.applied))
    assert found.winner is not None
    assert there.time is not None
    assert there.time.step_s == pytest.approx(found.winner.step_s, rel=1e-6)
    assert there.known_memory.needed_bytes == pytest.approx(found.winner.needed_bytes, rel=1e-6)


def test_experts_are_priced_as_the_stack_shards_them() -> None:
    """accelerate pads 8 experts to 16 rows; python and DeepSpeed do not."""
    fields = {"kind": "zero3", "recompute": "full", "reduce_dtype": "bf16"}
    run = large(model="mixtral-8x7b", job={"seq_len": 4096}, strategy=fields)
    here = estimate_run(run).known_memory
    there = {
        stack: estimate_run(run, along_rows=shards_along_rows(stack)).known_memory
        for stack in STACKS
    }
    padded = {stack for stack, memory in there.items() if memory.terms != here.terms}
    assert padded == {"accelerate", "trainer", "trl", "axolotl", "llama-factory"}
    # 8 experts of 3 x 14336 x 4096 in 32 layers, once more, over 16 devices in fp32.
    more = there["accelerate"].terms["parameters"] - here.terms["parameters"]
    assert more == 8 * 3 * 14336 * 4096 * 32 * 4 / 16
    assert any("pads the 8 experts" in s for s in export_run(run, "accelerate").unsupported)
    assert not any("experts" in s.lower() for s in export_run(run, "python").unsupported)


@pytest.mark.parametrize("stack", ["accelerate", "python"])
def test_a_plan_for_a_stack_that_pads_experts_has_its_figures(stack: str) -> None:
    found, run = plan_run(
        "mixtral-8x7b", "4x8xH200-SXM@400Gbps", seq_len=2048, global_batch="512Ki", for_stack=stack
    )
    assert found.winner is not None
    assert run is not None
    there = estimate_run(run, along_rows=shards_along_rows(stack)).known_memory
    assert there.needed_bytes == pytest.approx(found.winner.needed_bytes, rel=1e-6)
    # More than 8 devices would pad 8 experts, so accelerate shards in groups of 8.
    assert (run.strategy.shard == 8) == (stack == "accelerate")


ANY = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["ddp", "zero1", "zero2", "zero3", "hsdp"]),
        "accumulate": st.integers(1, 4),
        "recompute": st.sampled_from(["none", "selective", "full", 0.25]),
        "param_dtype": st.sampled_from(["fp32", "bf16", "fp16"]),
        "reduce_dtype": st.sampled_from(["fp32", "bf16"]),
        "grad_sync": st.sampled_from([None, "every", "local", "last"]),
        "reshard_after_forward": st.sampled_from([None, True, False, 4, 8]),
        "prefetch": st.integers(0, 2),
        "blocks_per_unit": st.integers(1, 2),
        "compile": st.booleans(),
        "offload": st.booleans(),
    }
)


@given(ANY, st.sampled_from(STACKS))
@examples(150)
def test_what_a_stack_runs_is_a_strategy_that_it_runs(fields: dict[str, Any], stack: str) -> None:
    """Applied twice, nothing changes any more."""
    try:
        run = large(strategy=fields)
    except SpecError:
        return  # it contradicts itself
    once = run._replace(strategy=applied_strategy(run, stack))
    assert changed_fields(once.strategy, applied_strategy(once, stack)) == {}
    assert export_run(run, stack).applied == once.strategy


def test_groups_are_not_tried_where_a_stack_has_none() -> None:
    run = large(strategy={"kind": "zero2", "shard": 8})
    limits = StackLimits(run, "deepspeed")
    assert not limits.allowed(run.strategy)
    assert limits.applied(run.strategy).shard == run.cluster.devices
    assert StackLimits(run, "python").allowed(run.strategy)


@pytest.mark.parametrize("stack", ["accelerate", "deepspeed"])
def test_smaller_clusters_are_tried_as_the_stack_runs_them(stack: str) -> None:
    found, run = plan_run(
        "llama-3.2-1b", "2x4xA100-40GB@10Gbps", seq_len=2048, global_batch="256Ki",
        objective="money", for_stack=stack,
    )  # fmt: skip
    assert found.size_choice is not None
    assert {size.cluster.devices for size in found.size_choice.sizes} >= {4, 8}
    assert run is not None
    assert run.strategy.devices == run.cluster.devices
    assert changed_fields(run.strategy, export_run(run, stack).applied) == {}


@pytest.mark.parametrize("stack", [None, "slurm", "kubernetes", "axolotl"])
def test_what_the_trainer_does_not_shard_is_not_sharded(stack: str | None) -> None:
    """Stacks of others shard the states of Muon as they do."""
    found, run = plan_run(
        "llama-3.2-1b", "4xA100-40GB", seq_len=2048, optimizer="muon", for_stack=stack
    )
    own = stack != "axolotl"
    assert {c.strategy.kind for c in found.layouts} == {"ddp"} if own else {"zero2", "zero3"}
    assert any(isinstance(one, OnlyReplicated) for one in found.warnings) == own
    assert run is not None
    assert "job.optimizer" not in export_run(run, stack or "slurm").changed


def test_no_change_leads_to_what_the_trainer_does_not_shard() -> None:
    """Where an optimizer is replicated and too large, and where its states are in few bits."""
    found, run = plan_run("llama-3-8b", "4xA100-40GB", seq_len=2048, optimizer="adafactor")
    assert run is None
    assert all(not miss.strategy.sharded for miss in found.rejected)
    assert not any("--strategy" in way.options or "offload" in way.options for way in found.ways)
    assert all(
        one.change == "adapter" and not one.strategy.sharded
        for one in found.tips
        if isinstance(one, Alternative)
    )
    divided = Space(tensor=(4,))
    for optimizer, most in (("adamw", 4), ("adamw-8bit", 1)):
        job = Job.read({"seq_len": 2048, "optimizer": optimizer})
        problem = Problem(
            find_model("llama-3-8b"), find_cluster("8xRTX-4090"), job, Strategy(kind="zero3")
        )
        searched = Search(problem, divided).run()
        assert max(c.strategy.tensor for c in searched.layouts()) == most


def test_values_are_narrowed_to_those_of_the_stack() -> None:
    limits = StackLimits(large(), "accelerate")
    assert limits.choices("recompute", ("none", "selective", 0.5, "full")) == ("none", "full")
    assert limits.choices("prefetch", (0, 1, 2)) == (1,)
    assert limits.choices("blocks_per_unit", (1, 2, 4)) == (1,)


@pytest.mark.parametrize(
    ("stack", "adapters"), [("axolotl", {"lora:16", "qlora:16"}), ("torchtitan", set())]
)
def test_an_adapter_is_proposed_only_where_the_stack_trains_one(
    stack: str, adapters: set[str]
) -> None:
    """Its figures are those of the stack, as `plan --for` with the adapter gives them."""
    asked: dict[str, Any] = {
        "model": "llama-3-70b",
        "cluster": "8xH100-SXM",
        "for_stack": stack,
    }
    found, _ = plan_run(**asked)
    tips = [t for t in found.tips if isinstance(t, Alternative) and t.change == "adapter"]
    assert {tip.value for tip in tips} == adapters
    for tip in tips[:1]:
        adapted, run = plan_run(**asked, adapter=tip.value)
        assert adapted.winner is not None
        assert run is not None
        ratio = tip.tokens_per_s / adapted.winner.tokens_per_s
        assert ratio == pytest.approx(1, abs=adapted.comparison_error)
        here = estimate_run(run, along_rows=shards_along_rows(stack)).known_memory
        assert here.needed_bytes == pytest.approx(adapted.winner.needed_bytes, rel=1e-6)


@pytest.mark.parametrize(
    ("stack", "has_it"),
    [("trainer", True), ("slurm", True)]
    + [(stack, False) for stack in ("deepspeed", "torchtitan", "python", "lightning")],
)
def test_smaller_states_are_proposed_only_where_the_stack_has_them(
    stack: str, has_it: bool
) -> None:
    found, _ = plan_run("llama-2-13b", "8xRTX-4090", for_stack=stack)
    assert found.winner is None
    offered = {tip.change for tip in found.tips if isinstance(tip, Alternative)}
    assert ("optimizer" in offered) == has_it


def test_a_model_that_the_stack_cannot_train_is_refused_before_the_search() -> None:
    with pytest.raises(SpecError, match="model: torchtitan"):
        plan_run("gpt2", "8xH100-SXM", for_stack="torchtitan")


def test_an_unknown_stack_is_refused() -> None:
    with pytest.raises(SpecError, match="did you mean 'accelerate'"):
        plan_run("gpt2", "8xH100-SXM", for_stack="acelerate")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_plan_keeps_the_dtype_of_reductions(dtype: str) -> None:
    run = large(strategy={"kind": "zero3", "reduce_dtype": dtype})
    _, chosen = plan_run(run=run)
    assert chosen is not None
    assert chosen.strategy.sharded
    assert chosen.strategy.reduce_dtype == dtype
