"""A strategy written for another stack and read back: the same, or the difference is announced."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.stacks.read import accelerate as from_accelerate
from shardwise.stacks.read import deepspeed as from_deepspeed
from shardwise.stacks.read.imported import Imported
from shardwise.stacks.write.differences import changed_fields
from shardwise.stacks.write.exported import Exported
from shardwise.stacks.write.exports import export_run
from tests.examples import examples
from tests.stacks.runs import large

yaml = pytest.importorskip("yaml")

# With one micro-batch in a step there is nothing between micro-batches that could differ.
ACCUMULATION = {"grad_sync", "reshard_after_backward"}
# Without sharding nothing is gathered, ahead or in groups of blocks, and freed.
SHARDING = {"reshard_after_forward", "reshard_after_backward", "prefetch", "forward_prefetch",
            "blocks_per_unit"}  # fmt: skip


def there_and_back(run: RunSpec, stack: str) -> tuple[Exported, Imported]:
    written = export_run(run, stack)
    if stack == "accelerate":
        table: Mapping[str, object] = yaml.safe_load(written.text)
        return written, from_accelerate.read(table)
    return written, from_deepspeed.read(json.loads(written.text))


def differing(run: RunSpec, back: Imported) -> set[str]:
    """The fields that mean something and did not come back."""
    ours = run.strategy
    cluster = run.cluster
    theirs = Strategy.read(back.strategy).resolve(cluster.devices, cluster.devices_per_node)
    found = {f for f in Strategy.model_fields if getattr(ours, f) != getattr(theirs, f)}
    found -= ACCUMULATION if ours.accumulate == 1 else set()
    found -= {"sequence_parallel"} if ours.tensor == 1 else set()
    return found - ({"ddp_bucket_mib"} if ours.sharded else SHARDING)


def named(sentences: tuple[str, ...]) -> set[str]:
    """The fields of a strategy that sentences begin with: `field = value, field = value: ...`."""
    starts = [sentence.partition(": ")[0] for sentence in sentences]
    found = {name for start in starts for name in re.findall(r"([\w.]+) = ", start)}
    return found & set(Strategy.model_fields)


def check(run: RunSpec, stack: str) -> set[str]:
    written, back = there_and_back(run, stack)
    lost = differing(run, back)
    assert named(written.unsupported) | named(written.in_script) == lost
    # Fields that the script sets do not differ in what the stack runs.
    assert named(written.unsupported) == set(changed_fields(run.strategy, written.applied))
    return lost


# (strategy, what accelerate cannot say, what DeepSpeed cannot say)
MATRIX: list[tuple[dict[str, Any], set[str], set[str]]] = [
    ({"kind": "ddp"}, set(), set()),
    ({"kind": "ddp", "param_dtype": "fp32"}, set(), set()),
    ({"kind": "ddp", "recompute": "full"}, {"recompute"}, {"recompute"}),
    ({"kind": "zero1"}, {"kind", "reduce_dtype"}, set()),
    ({"kind": "zero1", "accumulate": 4},
     {"kind", "reduce_dtype", "accumulate", "reshard_after_backward"}, set()),
    ({"kind": "zero2"}, {"reduce_dtype"}, set()),
    ({"kind": "zero2", "reduce_dtype": "bf16"}, set(), set()),
    ({"kind": "zero2", "accumulate": 4},
     {"reduce_dtype", "accumulate", "grad_sync", "reshard_after_backward"}, set()),
    ({"kind": "zero3"}, {"reduce_dtype"}, set()),
    ({"kind": "zero3", "param_dtype": "fp32"}, set(), set()),
    ({"kind": "zero3", "micro_batch": 3, "reduce_dtype": "bf16"}, {"micro_batch"}, set()),
    ({"kind": "zero3", "accumulate": 2, "param_dtype": "fp32"}, {"accumulate", "grad_sync"}, set()),
    ({"kind": "zero3", "accumulate": 2, "grad_sync": "last", "param_dtype": "fp32"},
     {"accumulate"}, {"grad_sync"}),
    ({"kind": "zero3", "recompute": "full", "param_dtype": "fp32"}, set(), {"recompute"}),
    ({"kind": "zero3", "recompute": 0.5, "param_dtype": "fp32"}, {"recompute"}, {"recompute"}),
    ({"kind": "zero3", "offload": True, "param_dtype": "fp32"}, set(), set()),
    ({"kind": "zero3", "compile": True, "param_dtype": "fp32"}, set(), {"compile"}),
    ({"kind": "zero3", "prefetch": 2, "blocks_per_unit": 2, "param_dtype": "fp32"},
     {"prefetch", "blocks_per_unit"}, {"prefetch", "blocks_per_unit"}),
    ({"kind": "zero3", "reshard_after_forward": 8, "param_dtype": "fp32"},
     {"reshard_after_forward"}, set()),
    ({"kind": "hsdp", "param_dtype": "fp32"}, set(),
     {"shard", "replicate", "reshard_after_forward"}),
    ({"kind": "zero2", "within_node": True, "param_dtype": "fp32"}, set(), {"shard", "replicate"}),
    ({"kind": "zero3", "param_dtype": "bf16", "reduce_dtype": "bf16", "master_dtype": "bf16"},
     {"param_dtype", "reduce_dtype", "master_dtype"}, set()),
    ({"kind": "ddp", "loss": "chunked"}, {"loss"}, {"loss"}),
    ({"kind": "zero3", "loss": "chunked", "loss_chunks": 16, "param_dtype": "fp32"},
     {"loss", "loss_chunks"}, {"loss", "loss_chunks"}),
    ({"kind": "ddp", "ddp_bucket_mib": 100}, {"ddp_bucket_mib"}, {"ddp_bucket_mib"}),
    # For accelerate, the script sets it.
    ({"kind": "ddp", "compress": "bf16"}, {"compress"}, {"compress"}),
    ({"kind": "ddp", "compress": "powersgd", "powersgd_rank": 2}, {"compress", "powersgd_rank"},
     {"compress", "powersgd_rank"}),
    # accelerate and AutoTP divide matrices only.
    ({"kind": "zero2", "tensor": 2, "param_dtype": "fp32"}, {"sequence_parallel"},
     {"sequence_parallel"}),
    ({"kind": "zero2", "tensor": 4, "sequence_parallel": False, "param_dtype": "fp32"}, set(),
     set()),
    # One attends in a ring, the other exchanges heads.
    ({"kind": "zero3", "context": 4, "param_dtype": "fp32"}, {"context_method"}, set()),
    ({"kind": "zero3", "context": 2, "context_method": "ring", "param_dtype": "fp32"}, set(),
     {"context_method"}),
]  # fmt: skip


def _id(value: dict[str, Any] | set[str]) -> str:
    """The same in every process, which the order of a set is not."""
    return str(value if isinstance(value, dict) else sorted(value))


@pytest.mark.parametrize(("strategy", "by_accelerate", "by_deepspeed"), MATRIX, ids=_id)
def test_what_is_lost_is_announced_and_nothing_else(
    strategy: dict[str, Any], by_accelerate: set[str], by_deepspeed: set[str]
) -> None:
    run = large(strategy=strategy)
    assert check(run, "accelerate") == by_accelerate
    assert check(run, "deepspeed") == by_deepspeed


def test_on_cpus_accelerate_shards_nothing() -> None:
    run = large(strategy={"kind": "zero3", "param_dtype": "fp32"}, cluster="1x2xCPU")
    written, back = there_and_back(run, "accelerate")
    assert back.strategy["kind"] == "ddp"
    assert {"kind", "shard", "replicate"} <= named(written.unsupported)


def test_processes_come_back() -> None:
    for stack in ("accelerate", "deepspeed"):
        run = large(strategy={"kind": "zero2", "micro_batch": 3, "accumulate": 5})
        assert there_and_back(run, stack)[1].processes == 16


DTYPES = st.sampled_from(["fp32", "bf16", "fp16"])
SETTINGS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["ddp", "zero1", "zero2", "zero3", "hsdp"]),
        "micro_batch": st.integers(1, 8),
        "accumulate": st.integers(1, 8),
        "recompute": st.sampled_from(["none", "selective", "full", 0.25]),
        "param_dtype": DTYPES,
        "reduce_dtype": DTYPES,
        "grad_sync": st.sampled_from([None, "every", "local", "last"]),
        "reshard_after_forward": st.sampled_from([None, True, False, 2, 4, 8]),
        "reshard_after_backward": st.sampled_from([None, True, False]),
        "prefetch": st.integers(0, 3),
        "forward_prefetch": st.integers(0, 2),
        "blocks_per_unit": st.integers(1, 3),
        "offload": st.booleans(),
        "compile": st.booleans(),
        "replicate": st.sampled_from([None, 2]),
        "tensor": st.sampled_from([1, 1, 2]),
        "context": st.sampled_from([1, 1, 4]),
        "sequence_parallel": st.booleans(),
    }
)


@given(SETTINGS, st.sampled_from(["accelerate", "deepspeed"]))
@examples(150)
def test_any_strategy_comes_back_or_says_why_not(fields: dict[str, Any], stack: str) -> None:
    try:
        run = large(strategy=fields)
        export_run(run, stack)
    except SpecError:
        return  # it contradicts itself, or the stack refuses it
    check(run, stack)
