"""Expert parallelism in the files of other stacks."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.planning.in_stack import with_software_of
from shardwise.spec.strategy import Strategy
from shardwise.stacks.limits import StackLimits
from shardwise.stacks.read import deepspeed, torchtitan_toml
from shardwise.stacks.read.imported import Imported
from shardwise.stacks.read.imports import import_file
from shardwise.stacks.write.exports import STACKS, export_run
from shardwise.units.dispatch import dispatch_of
from tests.stacks.runs import large

# The last two run Shardwise itself.
DIVIDES = ("torchtitan", "megatron-bridge", "deepspeed", "slurm", "kubernetes")
MIXTURE = "qwen3-30b-a3b"


def with_experts(**strategy: Any) -> Any:
    return large(model=MIXTURE, strategy={"kind": "zero3", "expert": 8, **strategy})


@pytest.mark.parametrize("stack", [name for name in STACKS if name != "lightning"])
def test_each_stack_divides_experts_or_says_that_it_does_not(stack: str) -> None:
    run = with_experts()
    exported = export_run(run, stack)
    named = [one for one in exported.differences if "expert" in one.fields]
    assert exported.applied.expert == (8 if stack in DIVIDES else 1)
    if stack != "python":  # its differences are sentences alone
        assert bool(named) == (stack not in DIVIDES)
    limits = StackLimits(large(model=MIXTURE), stack)
    runs = (1, 8) if stack in DIVIDES else (1,)
    assert limits.choices("expert", (1, 8)) == runs


@pytest.mark.parametrize("stack", ["torchtitan", "deepspeed"])
@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_the_degree_comes_back(stack: str, kind: str, tmp_path: Path) -> None:
    written = export_run(with_experts(kind=kind), stack)
    (tmp_path / written.name).write_text(written.text)
    found = import_file(tmp_path / written.name)
    assert found.strategy["expert"] == 8
    assert Strategy.read(found.strategy).resolve(16, 8).expert == 8


def megatron_settings(run: Any) -> dict[str, Any]:
    text = export_run(run, "megatron-bridge").text
    return {
        ast.unparse(node.targets[0]).removeprefix("model."): ast.literal_eval(node.value)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("model.")
    }


@pytest.mark.parametrize(
    ("dispatch", "kind", "backend"),
    [
        (None, "alltoall", None),
        ("all-to-all", "alltoall", None),
        ("deepep", "flex", "deepep"),
        ("hybridep", "flex", "hybridep"),
    ],
)
def test_megatron_is_told_how_tokens_travel(
    dispatch: str | None, kind: str, backend: str | None
) -> None:
    settings = megatron_settings(with_experts(dispatch=dispatch))
    assert settings["expert_model_parallel_size"] == 8
    assert settings["moe_token_dispatcher_type"] == kind
    assert settings.get("moe_flex_dispatcher_backend") == backend
    assert "expert_model" not in export_run(large(model=MIXTURE), "megatron-bridge").text


@pytest.mark.parametrize(
    ("stack", "dispatch"), [("megatron-bridge", "hybridep"), ("torchtitan", "deepep")]
)
def test_a_plan_for_a_stack_sends_tokens_as_it_can(stack: str, dispatch: str) -> None:
    run = with_software_of(stack, with_experts())
    assert dispatch_of(run.strategy, run.cluster) == dispatch
    exported = export_run(run, stack)
    assert f'"{dispatch}"' in exported.text or f"'{dispatch}'" in exported.text
    assert not [one for one in exported.differences if "dispatch" in one.fields]


@pytest.mark.parametrize("dispatch", ["deepep", "hybridep"])
def test_torchtitans_backend_comes_back(dispatch: str, tmp_path: Path) -> None:
    written = export_run(with_experts(dispatch=dispatch), "torchtitan")
    (tmp_path / written.name).write_text(written.text)
    assert import_file(tmp_path / written.name).strategy["dispatch"] == dispatch

    def with_backend(name: str) -> Imported:
        degrees = {"expert_parallel_degree": 4, "expert_parallel_comm_backend": name}
        training = {"steps": 10, "seq_len": 8192}
        return torchtitan_toml.read({"parallelism": degrees, "training": training})

    assert with_backend(dispatch).strategy["dispatch"] == dispatch
    found = with_backend("minimal_async_ep")
    assert "expert_parallel_comm_backend" in lost(found)
    assert found.strategy["expert"] == 4


def test_a_stack_without_the_library_says_so() -> None:
    exported = export_run(with_experts(dispatch="deepep"), "deepspeed")
    named = [one for one in exported.differences if "dispatch" in one.fields]
    assert [one.theirs["dispatch"] for one in named] == ["all-to-all"]
    assert not [
        one
        for one in export_run(with_experts(dispatch="all-to-all"), "deepspeed").differences
        if "dispatch" in one.fields
    ]


def test_deepspeed_takes_what_is_written() -> None:
    config = pytest.importorskip("deepspeed.module_inject.auto_ep_config", reason="needs deepspeed")
    written = json.loads(export_run(with_experts(), "deepspeed").text)
    parsed = config.parse_autoep_config(written["expert_parallel"])
    assert (parsed.enabled, parsed.autoep_size) == (True, 8)
    # Devices, and degrees of pipeline, tensor and sequence parallelism.
    config.validate_autoep_config(parsed, 16, 1, 1, 1, zero_stage=3)
    # AutoEP refuses stage 3 with groups, and knows no experts of other models.
    groups = with_experts(shard=8)
    assert "expert_parallel" not in json.loads(export_run(groups, "deepspeed").text)
    dense = large(strategy={"kind": "zero3", "expert": 8})
    assert "expert_parallel" not in json.loads(export_run(dense, "deepspeed").text)


def lost(found: Imported) -> set[str]:
    return {one.key for one in found.outcomes if one.is_lost}


@pytest.mark.parametrize(
    ("parallelism", "training", "read"),
    [
        ({}, {}, True),
        ({"tensor_parallel_degree": 2}, {}, False),
        ({"data_parallel_shard_degree": 1, "data_parallel_replicate_degree": 8}, {}, False),
        ({}, {"enable_cpu_offload": True}, False),
    ],
)
def test_what_shardwise_does_not_combine_is_told(
    parallelism: dict[str, object], training: dict[str, object], read: bool
) -> None:
    table = {
        "parallelism": {"expert_parallel_degree": 4, **parallelism},
        "training": {"steps": 10, "seq_len": 8192, **training},
    }
    found = torchtitan_toml.read(table)
    assert found.strategy.get("expert") == (4 if read else None)
    assert ("expert_parallel_degree" in lost(found)) == (not read)
    Strategy.read(found.strategy)


def test_auto_ep_counts_only_when_enabled() -> None:
    zero = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}
    off = deepspeed.read({**zero, "expert_parallel": {"autoep_size": 4}})
    on = deepspeed.read({**zero, "expert_parallel": {"enabled": True, "autoep_size": 4}})
    assert "expert" not in off.strategy
    assert on.strategy["expert"] == 4
    plain = {"zero_optimization": {"stage": 0}, "train_micro_batch_size_per_gpu": 1}
    ddp = deepspeed.read({**plain, "expert_parallel": {"enabled": True, "autoep_size": 4}})
    assert lost(ddp) == {"expert_parallel.autoep_size"}


@pytest.mark.parametrize("stack", [name for name in STACKS if name != "lightning"])
@pytest.mark.parametrize("kind", ["none", "local", "global"])
def test_each_stack_balances_routers_or_says_that_it_does_not(stack: str, kind: str) -> None:
    run = large(model=MIXTURE, train={"balance_loss": kind})
    exported = export_run(run, stack)
    named = [
        one
        for one in (*exported.differences, *exported.by_script)
        if "train.balance_loss" in one.words
    ]
    if stack in ("slurm", "kubernetes"):
        told = False
    elif stack == "megatron-bridge":
        told = kind == "global"
        theirs = {"none": "none", "local": "aux_loss", "global": "global_aux_loss"}
        assert megatron_settings(run)["moe_router_load_balancing_type"] == theirs[kind]
    else:
        # Without an auxiliary loss, torchtitan still moves biases of experts.
        told = kind != "none" or stack == "torchtitan"
    assert bool(named) == told


def test_a_dense_model_has_no_router_to_balance() -> None:
    for stack in ("torchtitan", "megatron-bridge"):
        exported = export_run(large(), stack)
        assert not any("train.balance_loss" in one.fields for one in exported.differences)
        assert "load_balancing" not in exported.text


READ = {
    "trl": "max_length: 2048\nrouter_aux_loss_coef: 0.01\n",
    "llama-factory": "stage: sft\nfinetuning_type: full\ncutoff_len: 64\nmodel_name_or_path: m\n"
    "moe_aux_loss_coef: 0.01\n",
}


@pytest.mark.parametrize("stack", READ)
def test_a_file_with_an_auxiliary_loss_says_how_to_set_it(stack: str, tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text(READ[stack])
    found = import_file(tmp_path / "file.yaml")
    assert any("train.balance_loss" in words for words in found.unsupported)


def test_axolotl_divides_experts(tmp_path: Path) -> None:
    text = (
        "base_model: m\nmicro_batch_size: 1\nsequence_len: 64\nbf16: true\nfsdp_version: 2\n"
        "fsdp_config:\n  reshard_after_forward: true\nexpert_parallel_size: 4\n"
    )
    (tmp_path / "file.yaml").write_text(text)
    assert import_file(tmp_path / "file.yaml").strategy["expert"] == 4
