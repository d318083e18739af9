"""The YAML for accelerate, as accelerate itself reads it; and accelerate's own files read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.stacks.read import accelerate
from shardwise.stacks.write.accelerate import export
from tests.stacks.runs import large, tiny

pytest.importorskip("accelerate")
yaml = pytest.importorskip("yaml")
torch = pytest.importorskip("torch")

# The gate does not install accelerate.
pytestmark = pytest.mark.nightly


def launched(run: RunSpec, folder: Path) -> dict[str, str]:
    """The environment in which `accelerate launch` would start the processes."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    file = folder / "accelerate.yaml"
    file.write_text(export(run).text)
    given = ["--config_file", str(file), "--main_process_ip", "localhost", "train.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(given))
    made: dict[str, str] = prepare_multi_gpu_env(args)
    return {key: value for key, value in made.items() if os.environ.get(key) != value}


STRATEGIES: list[dict[str, Any]] = [
    {"kind": "zero3"},
    {"kind": "zero2", "param_dtype": "fp16"},
    {"kind": "zero3", "offload": True, "recompute": "full", "param_dtype": "fp32"},
    {"kind": "hsdp"},
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_the_plugin_that_accelerate_makes_of_it(
    strategy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy

    for key, value in launched(large(strategy=strategy), tmp_path).items():
        monkeypatch.setenv(key, value)
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is (strategy["kind"] != "zero2")
    assert plugin.transformer_cls_names_to_wrap == ["LlamaDecoderLayer"]
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy) is strategy.get("offload", False)
    assert plugin.activation_checkpointing is (strategy.get("recompute") == "full")
    degrees = ParallelismConfig()
    hybrid = strategy["kind"] == "hsdp"
    assert (degrees.dp_replicate_size, degrees.dp_shard_size) == ((2, 8) if hybrid else (1, 1))
    precision = os.environ["ACCELERATE_MIXED_PRECISION"]
    assert precision == {"fp32": "no"}.get(*[strategy.get("param_dtype", "bf16")] * 2)


def test_accelerate_builds_the_mesh_of_tensor_and_context_degrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import ParallelismConfig

    run = large(strategy={"kind": "zero3", "replicate": 2, "tensor": 2, "context": 2})
    for key, value in launched(run, tmp_path).items():
        monkeypatch.setenv(key, value)
    degrees = ParallelismConfig()
    assert (degrees.dp_replicate_size, degrees.dp_shard_size) == (2, 2)
    assert (degrees.tp_size, degrees.cp_size, degrees.cp_backend) == (2, 2, "torch")
    assert degrees.total_size == run.cluster.devices
    # Tensor groups are neighbours, and states are shared by devices of one sequence too.
    names, sizes = degrees._get_mesh()
    assert dict(zip(names, sizes, strict=True)) == {"dp_replicate": 2, "dp_shard": 2, "cp": 2,
                                                    "tp": 2}  # fmt: skip
    assert names[-1] == "tp"
    assert degrees.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]


def test_gradients_are_reduced_in_the_dtype_of_mixed_precision() -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy="bf16")
    assert plugin.mixed_precision_policy.reduce_dtype is torch.bfloat16
    written = export(large(strategy={"kind": "zero3"}))
    assert written.applied.reduce_dtype == "bf16"
    assert any("reduce_dtype = fp32" in sentence for sentence in written.unsupported)


def test_ddp_there_holds_gradients_twice() -> None:
    from accelerate import DistributedDataParallelKwargs

    assert DistributedDataParallelKwargs().gradient_as_bucket_view is False
    assert any("4 bytes more" in x for x in export(large(strategy="ddp")).unsupported)


def test_accelerate_reads_every_file(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    single = tiny(cluster="1x1xCPU", strategy={"kind": "single"})
    runs = {"MULTI_GPU": large(strategy="ddp"), "MULTI_CPU": tiny(), "NO": single}
    for kind, run in runs.items():
        file = tmp_path / f"{kind}.yaml"
        file.write_text(export(run).text)
        found = load_config_from_file(str(file))
        assert found.distributed_type.value == kind
        assert (found.num_processes, found.num_machines) == (run.cluster.devices, run.cluster.nodes)


def test_a_file_that_accelerate_wrote(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    file = tmp_path / "config.yaml"
    ClusterConfig(
        compute_environment="LOCAL_MACHINE",
        distributed_type="FSDP",
        mixed_precision="bf16",
        use_cpu=False,
        debug=False,
        num_processes=8,
        fsdp_config={
            "fsdp_sharding_strategy": "SHARD_GRAD_OP",
            "fsdp_backward_prefetch": "BACKWARD_PRE",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_use_orig_params": True,
        },
    ).to_yaml_file(str(file))
    found = accelerate.read(yaml.safe_load(file.read_text()))
    assert found.strategy["kind"] == "zero2"
    assert found.strategy["prefetch"] == 1
    assert found.strategy["reduce_dtype"] == "bf16"
    assert found.processes == 8
    assert any("use_orig_params" in note for note in found.notes)


def test_its_numbers_for_sharding_strategies_are_accelerates() -> None:
    from accelerate.utils.constants import FSDP_SHARDING_STRATEGY

    theirs = [name.removeprefix("_") for name in FSDP_SHARDING_STRATEGY]
    assert [name.removeprefix("_") for name in accelerate.SHARDING] == theirs


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"distributed_type": "MEGATRON_LM"}, "distributed_type"),
        ({"distributed_type": "FSDP", "mixed_precision": "int3"}, "mixed_precision"),
        ({"distributed_type": "FSDP", "fsdp_config": "yes"}, "fsdp_config"),
        ({"distributed_type": "FSDP", "num_processes": "many"}, "num_processes"),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"sharding_strategy": "HALF"}},
            "fsdp_sharding_strategy",
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "x"}},
            "deepspeed_config",
        ),
    ],
)
def test_what_cannot_be_meant_is_named(table: dict[str, object], key: str) -> None:
    with pytest.raises(SpecError, match=key):
        accelerate.read(table)
