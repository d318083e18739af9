"""TrainingArguments: written, read back field by field, and read from scripts without running."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.spec.job import Job
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.spec.train import TrainSettings
from shardwise.stacks.read import torch_script, trainer
from shardwise.stacks.read.imports import import_file
from shardwise.stacks.write.differences import changed_fields
from shardwise.stacks.write.trainer import export
from tests.stacks.runs import large

TRAIN = {
    "steps": 1234,
    "learning_rate": 2e-5,
    "warmup_steps": 12,
    "weight_decay": 0.01,
    "beta1": 0.85,
    "beta2": 0.98,
    "epsilon": 1e-7,
    "clip_norm": 0.5,
}
# What TrainingArguments cannot say, beside how often the run saves in minutes.
STRATEGIES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "ddp": ({"kind": "ddp", "micro_batch": 4, "accumulate": 2}, set()),
    "ddp, buckets": ({"kind": "ddp", "ddp_bucket_mib": 50}, set()),
    "ddp, recompute": ({"kind": "ddp", "recompute": "full"}, set()),
    "fp32": ({"kind": "zero3", "param_dtype": "fp32"}, set()),
    "bf16": ({"kind": "zero3"}, {"reduce_dtype"}),
    "bf16 reductions": ({"kind": "zero3", "reduce_dtype": "bf16", "recompute": "full"}, set()),
    "zero2": ({"kind": "zero2", "reduce_dtype": "bf16"}, set()),
    "zero1": ({"kind": "zero1", "reduce_dtype": "bf16"}, {"kind"}),
    "accumulated": (
        {"kind": "zero3", "reduce_dtype": "bf16", "accumulate": 4, "grad_sync": "last"}, set(),
    ),
    "offload": ({"kind": "zero3", "reduce_dtype": "bf16", "offload": True}, set()),
    "compile": ({"kind": "zero3", "reduce_dtype": "bf16", "compile": True}, set()),
    "share": ({"kind": "zero3", "reduce_dtype": "bf16", "recompute": 0.5}, {"recompute"}),
    "prefetch": ({"kind": "zero3", "reduce_dtype": "bf16", "prefetch": 2}, {"prefetch"}),
    "groups": ({"kind": "hsdp", "reduce_dtype": "bf16"}, set()),
}  # fmt: skip


def written_and_read(run: RunSpec, folder: Path) -> tuple[dict[str, Any], Any]:
    file = folder / "trainer.json"
    file.write_text(export(run).text)
    return json.loads(file.read_text()), import_file(file)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_comes_back_or_is_listed(name: str, tmp_path: Path) -> None:
    fields, unsupported = STRATEGIES[name]
    run = large(strategy=fields, train=TRAIN)
    _, back = written_and_read(run, tmp_path)
    exported = export(run)
    assert set(changed_fields(run.strategy, exported.applied)) == unsupported
    # JSON cannot hold groups: the script passes them.
    by_script = {"shard", "replicate"} if run.strategy.hybrid else set()
    size = run.cluster.devices, run.cluster.devices_per_node
    read_back = Strategy.read(back.strategy).resolve(*size)
    assert set(changed_fields(run.strategy, read_back)) == unsupported | by_script
    for field in unsupported:
        assert any(f"{field} = " in sentence for sentence in exported.unsupported)
    for field in by_script:
        assert any(f"{field} = " in sentence for sentence in exported.in_script)


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_settings_of_training_come_back(schedule: str, optimizer: str, tmp_path: Path) -> None:
    given = {**TRAIN, "schedule": schedule, "final_learning_rate": 0.2}
    run = large(train=given, job={"seq_len": 8192, "optimizer": optimizer})
    table, back = written_and_read(run, tmp_path)
    ours = TrainSettings.read(given)
    theirs = TrainSettings.read(back.train)
    absent = {"final_learning_rate"} if schedule == "constant" else set()
    for field in set(given) - absent:
        assert getattr(theirs, field) == getattr(ours, field), field
    assert Job.read({"seq_len": 8192, **back.job}).optimizer == optimizer
    # How long a sequence is belongs to the data, or to TRL's SFTConfig.
    assert "max_length" not in table


@pytest.mark.parametrize("key", ["max_length", "max_seq_length"])
@pytest.mark.parametrize("form", ["json", "yaml"])
def test_the_length_of_sequences_is_kept(key: str, form: str, tmp_path: Path) -> None:
    file = tmp_path / f"args.{form}"
    table = {"per_device_train_batch_size": 2, key: 2048, "packing": True, "dataset_name": "x"}
    text = json.dumps(table)
    file.write_text(text if form == "json" else "\n".join(f"{k}: {v}" for k, v in table.items()))
    found = import_file(file)
    assert found.job["seq_len"] == 2048
    # Names of data and packing change no plan.
    assert not any("packing" in sentence or "dataset" in sentence for sentence in found.unsupported)


SCRIPT = """
import os
from transformers import Trainer, TrainingArguments
os.system("touch pwned")
BATCH = 4
args = TrainingArguments(
    "out",
    per_device_train_batch_size=BATCH,
    gradient_accumulation_steps=2 * BATCH,
    learning_rate=2e-5,
    bf16=True,
    gradient_checkpointing=False,
    fsdp="full_shard auto_wrap",
    fsdp_config={"version": 2, "activation_checkpointing": True},
    logging_steps=int(os.environ["STEPS"]),
    max_steps=steps(),
)
Trainer(model=model, args=args, train_dataset=data).train()
"""


def test_a_script_with_training_arguments_is_read_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    found = import_file(tmp_path / "train.py")
    assert not (tmp_path / "pwned").exists()
    expected = {"kind": "zero3", "micro_batch": 4, "accumulate": 8, "recompute": "full",
                "param_dtype": "bf16", "grad_sync": "last"}  # fmt: skip
    assert expected.items() <= found.strategy.items()
    assert found.train["learning_rate"] == 2e-5
    # What only running it tells is listed, not guessed.
    assert "steps" not in found.train
    assert any(sentence.startswith("max_steps: ") for sentence in found.unsupported)
    # The same settings as JSON are the same run.
    table = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "bf16": True,
             "learning_rate": 2e-5, "fsdp": "full_shard auto_wrap",
             "fsdp_config": {"version": 2, "activation_checkpointing": True}}  # fmt: skip
    assert trainer.read(table).strategy == found.strategy


def test_a_script_with_an_sft_config_has_the_defaults_of_trl() -> None:
    text = "from trl import SFTConfig\nargs = SFTConfig(per_device_train_batch_size=2, {})"
    found = torch_script.read(text.format(""))
    assert found.job["seq_len"] == 1024
    assert found.strategy["recompute"] == "full"
    assert found.strategy["param_dtype"] == "bf16"
    found = torch_script.read(
        text.format("max_length=4096, gradient_checkpointing=False, fp16=True, **more")
    )
    assert found.job["seq_len"] == 4096
    assert found.strategy.get("recompute", "none") == "none"
    assert found.strategy["param_dtype"] == "fp16"
    assert any("dictionary" in sentence for sentence in found.unsupported)


def test_peft_without_layers_is_listed() -> None:
    found = trainer.read({"per_device_train_batch_size": 2, "use_peft": True})
    assert found.adapter["rank"] == 16
    assert any(s.startswith("lora_target_modules: ") for s in found.unsupported)


def test_a_script_that_shards_itself_is_read_as_such() -> None:
    text = (
        "from torch.distributed.fsdp import fully_shard\n"
        "from transformers import TrainingArguments\n"
        "args = TrainingArguments(per_device_train_batch_size=2)\nfully_shard(model)\n"
    )
    assert torch_script.read(text).what == "a script with FSDP2"


def test_a_script_without_arguments_names_what_to_import() -> None:
    with pytest.raises(SpecError, match="TrainingArguments"):
        torch_script.read("from transformers import Trainer\nTrainer(model).train()")


@pytest.mark.nightly
@pytest.mark.parametrize("name", STRATEGIES)
def test_transformers_reads_every_file(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    run = large(strategy=STRATEGIES[name][0], train=TRAIN)
    table = json.loads(export(run).text)
    # Without GPUs transformers refuses bf16 and fused optimizers; all else is as written.
    table |= {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    file = tmp_path / "trainer.json"
    file.write_text(json.dumps(table))
    parser = transformers.HfArgumentParser((transformers.TrainingArguments,))
    (args,) = parser.parse_json_file(str(file))
    assert args.per_device_train_batch_size == run.strategy.micro_batch
    assert args.gradient_accumulation_steps == run.strategy.accumulate
    assert args.max_steps == TRAIN["steps"]
    assert args.learning_rate == TRAIN["learning_rate"]
    assert args.max_grad_norm == TRAIN["clip_norm"]
    assert bool(args.fsdp) is run.strategy.sharded
    if run.strategy.sharded:
        plugin = args.fsdp_plugin_args
        assert plugin["fsdp_version"] == 2
        keeps = run.strategy.reshard_after_forward is False
        assert plugin["reshard_after_forward"] is not keeps
        assert plugin["activation_checkpointing"] is (run.strategy.recompute not in ("none", 0.0))
        assert plugin.get("cpu_offload", False) is run.strategy.offload
