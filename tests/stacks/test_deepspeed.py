"""The JSON for DeepSpeed, as DeepSpeed itself reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.stacks.read import deepspeed
from shardwise.stacks.write.deepspeed import export
from tests.stacks.runs import large

torch = pytest.importorskip("torch")
runtime = pytest.importorskip("deepspeed.runtime.config")

# The gate does not install deepspeed.
pytestmark = pytest.mark.nightly


def parsed(run: RunSpec) -> Any:
    """What DeepSpeed makes of it. This process is alone, so its batch is that of one device."""
    table = json.loads(export(run).text)
    micro, accumulate = run.strategy.micro_batch, run.strategy.accumulate
    assert table["train_batch_size"] == micro * accumulate * run.cluster.devices
    return runtime.DeepSpeedConfig({**table, "train_batch_size": micro * accumulate})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_stages_and_dtypes(stage: int, precision: str) -> None:
    kind = ("ddp", "zero1", "zero2", "zero3")[stage]
    settings = {"kind": kind, "param_dtype": precision, "micro_batch": 2, "accumulate": 3}
    found = parsed(large(strategy=settings))
    assert found.zero_config.stage == stage
    assert found.train_micro_batch_size_per_gpu == 2
    assert found.gradient_accumulation_steps == 3
    low, sharded = precision != "fp32", stage > 0
    assert found.bfloat16_config.enabled is (precision == "bf16" and sharded)
    assert found.float16_config.enabled is (precision == "fp16" and sharded)
    assert found.torch_autocast_enabled is (low and not sharded)
    if low and sharded:
        assert found.communication_data_type is torch.float32
        assert found.grad_accum_dtype == "fp32"


def test_integer_reshard_is_hpz() -> None:
    found = parsed(large(strategy={"kind": "zero3", "reshard_after_forward": 8}))
    assert found.zero_config.zero_hpz_partition_size == 8


def test_hybrid_sharding_was_removed_there() -> None:
    run = large(strategy="hsdp")
    assert parsed(run).zero_config.zero_hpz_partition_size == 8
    loss = next(x for x in export(run).unsupported if x.startswith("shard = 8, replicate = 2"))
    assert "MiCS" in loss
    with pytest.raises(runtime.DeepSpeedConfigError, match="MiCS"):
        runtime.DeepSpeedConfig(
            {"train_batch_size": 1, "zero_optimization": {"stage": 3, "mics_shard_size": 8}}
        )


def test_prefetch_counts_elements_of_blocks() -> None:
    # A block of Llama 3 8B: q and o, k and v, three matrices of the MLP, two norms.
    block = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    found = parsed(large(strategy={"kind": "zero3", "prefetch": 2}))
    assert found.zero_config.prefetch_bucket_size == 2 * block


def test_offload() -> None:
    three = parsed(large(strategy={"kind": "zero3", "offload": True})).zero_config
    assert (three.offload_param.device, three.offload_optimizer.device) == ("cpu", "cpu")
    two = large(strategy={"kind": "zero2", "offload": True})
    assert parsed(two).zero_config.offload_param is None
    (kept,) = (one for one in export(two).differences if "offload" in one.fields)
    assert kept.theirs["offload"] == "optimizer"


def test_master_in_bf16() -> None:
    low = dict.fromkeys(("param_dtype", "reduce_dtype", "master_dtype"), "bf16")
    found = parsed(large(strategy={"kind": "zero3", **low}))
    assert found.bfloat16_config.bf16_master_weights_and_grads
    assert found.communication_data_type is torch.bfloat16


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_learning_rates_are_at_most_one_step_behind(schedule: str) -> None:
    from deepspeed.runtime import lr_schedules

    settings = {"steps": 200, "warmup_steps": 20, "schedule": schedule, "learning_rate": 1e-3}
    # It has no other end of a line.
    run = large(train=settings | ({"final_learning_rate": 0} if schedule == "linear" else {}))
    assert run.train is not None
    scheduler = json.loads(export(run).text)["scheduler"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    theirs = getattr(lr_schedules, scheduler["type"])(optimizer, **scheduler["params"])
    for step in range(200):
        theirs.step()
        near = [run.train.learning_rate_at(max(0, step + shift)) for shift in (-1, 0, 1)]
        rate = theirs.get_last_lr()[0]
        assert rate == 0.0 if step == 0 else min(near) * 0.999 <= rate <= max(near) * 1.001


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "momentum", "lion"])
def test_optimizers_come_back(optimizer: str) -> None:
    job = {"seq_len": 128, "optimizer": optimizer}
    run = large(job=job, train={"learning_rate": 2e-4, "clip_norm": 0.5, "beta2": 0.99})
    assert parsed(run).gradient_clipping == 0.5
    back = deepspeed.read(json.loads(export(run).text))
    assert back.job == {"optimizer": optimizer}
    assert back.train["learning_rate"] == 2e-4
    assert back.train["clip_norm"] == 0.5
    assert back.train.get("beta2", 0.99) == 0.99


def test_deepspeeds_adam_is_adamw_unless_told_otherwise() -> None:
    assert runtime.ADAM_W_MODE_DEFAULT is True
    table = {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": "auto"}}}
    found = deepspeed.read(table)
    assert found.job["optimizer"] == "adamw"
    assert "learning_rate" not in found.train


def test_the_file_of_a_trainer() -> None:
    """With "auto" everywhere, as transformers' documentation has it."""
    found = deepspeed.read(
        {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}},
            "bf16": {"enabled": "auto"},
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
        }
    )
    assert found.strategy["kind"] == "zero3"
    assert found.processes is None
    lost = " ".join(found.unsupported)
    assert all(word in lost for word in ("micro_batch", "accumulate", "bf16.enabled", "NVMe"))


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"zero_optimization": {"stage": 4}}, "stage"),
        ({"zero_optimization": {"stage": True}}, "stage"),
        ({"zero_optimization": [3]}, "zero_optimization"),
        ({"train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu"),
        (
            {
                "train_batch_size": 7,
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 1,
            },
            "train_batch_size",
        ),
        ({"bf16": {"enabled": "perhaps"}}, "bf16.enabled"),
        ({"communication_data_type": "int8"}, "communication_data_type"),
        ({"gradient_clipping": "tight"}, "gradient_clipping"),
    ],
)
def test_what_cannot_be_meant_is_named(table: dict[str, object], key: str) -> None:
    with pytest.raises(SpecError, match=key):
        deepspeed.read(table)
