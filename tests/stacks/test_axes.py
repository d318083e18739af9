"""Tensor and context parallelism in the files of other stacks, and read back from them."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.stacks.limits import StackLimits
from shardwise.stacks.read.imports import import_file, imported_strategy
from shardwise.stacks.read.torch_script import read as read_script
from shardwise.stacks.write.axes import AXES
from shardwise.stacks.write.differences import changed_fields
from shardwise.stacks.write.exports import STACKS, export_run
from tests.stacks.runs import large, tiny

pytest.importorskip("yaml")

# What a stack prefers, in all three degrees; two devices shard what the others divide.
FIELDS = ("kind", "replicate", "shard", "tensor", "context", "sequence_parallel", "context_method")


def divided(stack: str, **strategy: Any) -> RunSpec:
    """A run of 16 devices with the methods that a stack has."""
    axes = AXES[stack]
    fields: dict[str, Any] = {"kind": "zero3", "param_dtype": "fp32", "micro_batch": 2}
    fields |= {"tensor": 2, "sequence_parallel": axes.tensor[0]} if axes.tensor else {}
    fields |= {"context": 2, "context_method": axes.context[0]} if axes.context else {}
    return large(strategy={**fields, **strategy})


def read_back(run: RunSpec, stack: str, folder: Path) -> Strategy:
    written = export_run(run, stack)
    file = folder / written.name
    file.write_text(written.text)
    imported = import_file(file)
    if imported.processes is not None:
        assert imported.processes == run.cluster.devices
    cluster = run.cluster
    fields = imported_strategy(imported, cluster.devices)
    return Strategy.read(fields).resolve(cluster.devices, cluster.devices_per_node)


@pytest.mark.parametrize("stack", ["accelerate", "torchtitan", "axolotl", "trl", "python"])
@pytest.mark.parametrize("replicate", [1, 2])
def test_degrees_come_back_from_the_file(stack: str, replicate: int, tmp_path: Path) -> None:
    run = divided(stack, replicate=replicate)
    back = read_back(run, stack, tmp_path)
    for field in FIELDS:
        assert getattr(back, field) == getattr(run.strategy, field), field
    unsupported = export_run(run, stack).unsupported
    assert not [said for said in unsupported if said.startswith(("tensor", "context", "sequence"))]


@pytest.mark.parametrize("degrees", [{"tensor": 4, "context": 1}, {"tensor": 1, "context": 4}])
def test_degrees_come_back_from_deepspeed(degrees: dict[str, int], tmp_path: Path) -> None:
    run = divided("deepspeed", kind="zero2", **degrees)
    back = read_back(run, "deepspeed", tmp_path)
    assert not set(changed_fields(run.strategy, back)) & set(FIELDS)
    assert back.data_parallel == 4


def test_degrees_of_the_trainer_are_for_its_script(tmp_path: Path) -> None:
    run = divided("trainer")
    written = export_run(run, "trainer")
    [said] = [text for text in written.in_script if "ParallelismConfig" in text]
    call = said[said.index("ParallelismConfig") : said.index(" of accelerate")]
    script = tmp_path / "train.py"
    script.write_text(
        "from accelerate import ParallelismConfig\nfrom transformers import TrainingArguments\n"
        f"args = TrainingArguments(fsdp=True, parallelism_config={call})\n"
    )
    strategy = Strategy.read(import_file(script).strategy).resolve(16, 8)
    assert [getattr(strategy, field) for field in FIELDS] == [
        getattr(written.applied, field) for field in FIELDS
    ]


@pytest.mark.parametrize("stack", sorted(set(STACKS) - {"slurm", "kubernetes"}))
def test_methods_that_a_stack_lacks_are_listed(stack: str) -> None:
    axes = AXES[stack]
    tensor = {"kind": "zero2", "context": 1, "tensor": 2}
    for divides in (True, False) if axes.tensor else ():
        run = divided(stack, **tensor, sequence_parallel=divides)
        said = [text.startswith("sequence_parallel") for text in export_run(run, stack).unsupported]
        assert any(said) is (divides not in axes.tensor)
    for method in ("ulysses", "ring") if axes.context else ():
        run = divided(stack, tensor=1, context=2, context_method=method)
        said = [text.startswith("context_method") for text in export_run(run, stack).unsupported]
        assert any(said) is (method not in axes.context)


# (stack, strategy, a word of the reason)
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("lightning", {"kind": "zero3", "tensor": 2}, "tensor"),
    ("llama-factory", {"kind": "zero3", "context": 2}, "context"),
    ("trl", {"kind": "zero3", "tensor": 2}, "tensor"),
    ("trl", {"kind": "zero1", "context": 2}, "DeepSpeed"),
    ("deepspeed", {"kind": "zero3", "tensor": 2}, "stages 0 to 2"),
    ("deepspeed", {"kind": "zero2", "tensor": 2, "context": 2}, "AutoTP"),
    ("accelerate", {"kind": "ddp", "tensor": 2}, "sharding"),
    ("accelerate", {"kind": "zero3", "tensor": 8, "context": 2}, "heads"),
    ("axolotl", {"kind": "zero3", "shard": 1, "replicate": 2, "context": 8}, "shard"),
    ("python", {"kind": "ddp", "tensor": 2}, "sharding"),
    ("torchtitan", {"kind": "zero3", "tensor": 16}, "heads"),
]


@pytest.mark.parametrize(("stack", "strategy", "word"), REFUSED, ids=str)
def test_what_a_stack_cannot_run_is_refused_in_a_sentence(
    stack: str, strategy: dict[str, Any], word: str
) -> None:
    model: Any = "llama-3-8b"
    if word == "heads":
        sizes = {"family": "llama", "layers": 2, "hidden": 64, "ffn": 96, "vocab": 256}
        model = {**sizes, "heads": 16, "kv_heads": 4}
    with pytest.raises(SpecError, match=word) as refused:
        export_run(large(model=model, strategy=strategy), stack)
    assert "\n" not in str(refused.value)


def test_on_cpus_accelerate_divides_nothing() -> None:
    run = tiny(cluster="1x4xCPU", strategy={"kind": "zero3", "tensor": 2})
    with pytest.raises(SpecError, match="GPUs"):
        export_run(run, "accelerate")


def test_schedulers_start_what_the_run_says() -> None:
    for stack in ("slurm", "kubernetes"):
        run = large(strategy={"kind": "zero3", "tensor": 8, "context": 2})
        assert export_run(run, stack).applied == run.strategy


def test_a_plan_for_a_stack_uses_its_methods() -> None:
    limits = StackLimits(large(strategy={"kind": "zero3", "param_dtype": "fp32"}), "accelerate")
    base = limits.base(Strategy(kind="zero3", param_dtype="fp32"))
    assert (base.sequence_parallel, base.context_method) == (False, "ring")
    start = base.resolve(16, 8)
    assert limits.allowed(start.but(shard=4, tensor=2, context=2))
    assert not limits.allowed(start.but(shard=8, tensor=2, sequence_parallel=True))
    # accelerate needs something to shard over, TRL divides no matrices.
    assert not limits.allowed(start.but(shard=1, tensor=16))
    for_trl = StackLimits(large(), "trl")
    assert for_trl.choices("tensor", (1, 2)) == (1,)


def test_a_step_of_every_stack_has_the_same_sequences(tmp_path: Path) -> None:
    """Devices that work on the same sequences do not count."""
    yaml = pytest.importorskip("yaml")
    run = divided("torchtitan", accumulate=3)
    rows = 2 * 3 * 4
    assert f"global_batch_size={rows}," in export_run(run, "torchtitan").text
    assert f"global_batch_size={rows}," in export_run(run, "megatron-bridge").text
    run = divided("deepspeed", context=1, kind="zero2")
    table = yaml.safe_load(export_run(run, "deepspeed").text)
    assert table["train_batch_size"] == 2 * 8


MEGATRON: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"kind": "zero3", "tensor": 4, "context": 2, "recompute": 0.25},
        {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params",
         "tensor_model_parallel_size": 4, "context_parallel_size": 2, "sequence_parallel": True,
         "cp_comm_type": "a2a", "recompute_granularity": "full", "recompute_method": "block",
         "recompute_num_layers": 8, "ckpt_format": "fsdp_dtensor", "global_batch_size": 2},
    ),
    (
        {"kind": "zero1", "tensor": 8, "sequence_parallel": False, "accumulate": 4,
         "recompute": "full"},
        {"use_megatron_fsdp": False, "use_distributed_optimizer": True,
         "data_parallel_sharding_strategy": "no_shard", "sequence_parallel": False,
         "recompute_method": "uniform", "recompute_num_layers": 1, "ckpt_format": "torch_dist",
         "micro_batch_size": 1, "global_batch_size": 8, "seq_length": 8192},
    ),
    (
        {"kind": "zero2", "context": 4, "context_method": "ring", "reduce_dtype": "bf16"},
        {"data_parallel_sharding_strategy": "optim_grads", "cp_comm_type": "p2p",
         "grad_reduce_in_fp32": False, "recompute_granularity": None},
    ),
    ({"kind": "ddp"}, {"use_distributed_optimizer": False, "overlap_param_gather": False}),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "expected"), MEGATRON, ids=str)
def test_settings_of_megatron_bridge(strategy: dict[str, Any], expected: dict[str, Any]) -> None:
    written = export_run(large(strategy=strategy), "megatron-bridge")
    compile(written.text, written.name, "exec")
    found: dict[str, list[object]] = {}
    for node in ast.walk(ast.parse(written.text)):
        if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
            found.setdefault(str(node.arg), []).append(node.value.value)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            assert isinstance(node.value, ast.Constant)
            found.setdefault(node.targets[0].attr, []).append(node.value.value)
    for name, value in expected.items():
        assert found[name] == [value] * len(found[name]), name


def test_megatron_bridge_refuses_what_it_has_not() -> None:
    with pytest.raises(SpecError, match="gpt2|model"):
        export_run(large(model="gpt2", job={"seq_len": 1024}), "megatron-bridge")
    with pytest.raises(SpecError, match="GPUs"):
        export_run(tiny(), "megatron-bridge")


def test_a_script_by_hand_with_a_mesh_of_two_axes() -> None:
    imported = read_script(
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "from torch.distributed.tensor.parallel import *\n"
        'mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp", "tp"))\n'
        'parallelize_module(model, mesh["tp"], {"out": RowwiseParallel()})\n'
        'fully_shard(model, mesh=mesh["dp"])\n'
    )
    degrees = {name: imported.strategy[name] for name in ("tensor", "shard", "sequence_parallel")}
    assert degrees == {"tensor": 2, "shard": 4, "sequence_parallel": False}
    assert imported.processes == 8
    unknown = read_script(
        "from torch.distributed.fsdp import fully_shard\n"
        "from torch.distributed.tensor.parallel import parallelize_module\n"
        "parallelize_module(model, mesh, plan)\nfully_shard(model)\n"
    )
    assert "tensor" not in unknown.strategy
    assert any("parallelize_module" in said for said in unknown.unsupported)


def test_combinations_that_a_stack_refuses_are_said(tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    head = "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n"
    file.write_text(
        f"{head}parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n"
        "  parallelism_config_tp_size: 2\n  parallelism_config_cp_size: 2\n"
        "  parallelism_config_sp_size: 2\n"
    )
    imported = import_file(file)
    assert (imported.strategy["tensor"], imported.strategy["context"]) == (2, 2)
    assert imported.strategy["context_method"] == "ring"
    said = " ".join(imported.unsupported)
    assert "sp_size" in said
    assert "dp_replicate_size" in said


def test_ulysses_of_deepspeed_through_accelerate_and_axolotl(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n  zero_stage: 3\n"
        "parallelism_config:\n  parallelism_config_sp_size: 4\n"
    )
    assert import_file(file).strategy["context"] == 4
    file.write_text(
        "base_model: m\nmicro_batch_size: 1\nfsdp_version: 2\nfsdp_config:\n"
        "  reshard_after_forward: true\ncontext_parallel:\n  size: 2\n  backend: ulysses\n"
    )
    strategy = import_file(file).strategy
    assert (strategy["context"], strategy["context_method"]) == (2, "ulysses")
