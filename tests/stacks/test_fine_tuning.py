"""Fine-tuning stacks: a run that is written and read back is the same, or the loss is listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.spec import catalogue
from shardwise.spec.adapter import Adapter
from shardwise.spec.catalogue import traced
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.spec.train import TrainSettings
from shardwise.stacks.experts import with_base_of
from shardwise.stacks.limits import StackLimits
from shardwise.stacks.read import axolotl, llama_factory, torch_script, trainer
from shardwise.stacks.read.imported import Imported
from shardwise.stacks.read.imports import import_file, imported_run
from shardwise.stacks.read.optimizers import NAMES, known_optimizers
from shardwise.stacks.write.differences import changed_fields
from shardwise.stacks.write.exported import Exported
from shardwise.stacks.write.exports import export_run
from tests.stacks.runs import large

yaml = pytest.importorskip("yaml")

STACKS = ("trl", "axolotl", "llama-factory", "trainer")
TRAIN = {
    "steps": 1234,
    "seed": 7,
    "learning_rate": 2e-4,
    "warmup_steps": 12,
    "final_learning_rate": 0.2,
    "weight_decay": 0.01,
    "beta1": 0.85,
    "beta2": 0.98,
    "epsilon": 1e-7,
    "clip_norm": 0.5,
}
ADAPTERS: dict[str, dict[str, Any] | None] = {
    "full": None,
    "lora": {"rank": 16, "dropout": 0.05},
    "qlora": {"rank": 8, "alpha": 32, "base": "nf4", "targets": ["q_proj", "v_proj"]},
    "int8": {"rank": 8, "base": "int8"},
    "rslora": {"rank": 64, "rslora": True, "targets": ["q_proj"]},
    "dora": {"rank": 4, "dora": True},
    "saved": {"rank": 4, "train": ["embed_tokens", "lm_head"]},
    "frozen": {"train": ["layers.31.", "norm"]},
    "fp32 base": {"rank": 16, "base": "fp32"},
    "fp8 base": {"rank": 16, "base": "fp8"},
    "odd alpha": {"rank": 16, "alpha": 11.5},
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"kind": "ddp", "micro_batch": 4, "accumulate": 2, "recompute": "full"},
    "zero1": {"kind": "zero1", "recompute": "full"},
    "zero2": {"kind": "zero2", "reduce_dtype": "bf16"},
    "zero3": {"kind": "zero3", "reduce_dtype": "bf16", "recompute": "full"},
    "fp32": {"kind": "zero3", "param_dtype": "fp32"},
    "hybrid": {"kind": "hsdp", "reduce_dtype": "bf16"},
    "offload": {"kind": "zero3", "reduce_dtype": "bf16", "offload": True, "loss": "chunked"},
    "bf16": {
        "kind": "zero3", "param_dtype": "bf16", "reduce_dtype": "bf16", "master_dtype": "bf16",
    },
}  # fmt: skip


def there_and_back(run: RunSpec, stack: str, folder: Path) -> tuple[Exported, Imported]:
    written = export_run(run, stack)
    file = folder / written.name
    file.write_text(written.text)
    return written, import_file(file)


def is_listed(name: str, sentences: tuple[str, ...]) -> bool:
    return any(f"{name} = " in sentence for sentence in sentences)


def a_run(adapter: dict[str, Any] | None, strategy: dict[str, Any]) -> RunSpec:
    sections: dict[str, Any] = {"strategy": strategy, "train": TRAIN}
    return large(**sections, **({"adapter": adapter} if adapter else {}))


def check_strategy(run: RunSpec, written: Exported, back: Imported) -> None:
    ours, size = run.strategy, (run.cluster.devices, run.cluster.devices_per_node)
    theirs = Strategy.read(back.strategy).resolve(*size)
    lost = set(changed_fields(ours, theirs))
    listed = (*written.unsupported, *written.in_script)
    assert {name for name in lost if not is_listed(name, listed)} == set()
    # Nothing is listed that did come back.
    said = {name for name in Strategy.model_fields if is_listed(name, written.unsupported)}
    assert said == set(changed_fields(ours, written.applied)) <= lost


def check_adapter(run: RunSpec, written: Exported, back: Imported) -> None:
    ours = run.adapter
    if ours is None:
        assert back.adapter == {}
        return
    if not back.adapter:
        assert is_listed("adapter", written.unsupported)
        return
    theirs = Adapter.read(back.adapter)
    for name in Adapter.model_fields:
        field = "scale" if name == "alpha" else name
        same = getattr(ours, field) == getattr(theirs, field)
        assert same or is_listed(f"adapter.{name}", written.unsupported), name


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_comes_back_or_its_loss_is_listed(
    strategy: str, adapter: str, stack: str, tmp_path: Path
) -> None:
    run = a_run(ADAPTERS[adapter], STRATEGIES[strategy])
    written, back = there_and_back(run, stack, tmp_path)
    check_strategy(run, written, back)
    check_adapter(run, written, back)
    theirs = TrainSettings.read(back.train)
    for name in TRAIN:
        same = getattr(theirs, name) == getattr(run.train, name)
        assert same or is_listed(f"train.{name}", written.unsupported), name
    by_script = stack == "trainer" and run.adapter is None
    assert back.job.get("seq_len") == (None if by_script else 8192)
    # The same settings make a run again.
    again = imported_run(back, run.model.but(adapter=None), run.cluster)
    assert (again.adapter is None) == (not back.adapter)


# What no sentence may be needed for: (strategy, adapter, stack).
EXACT = [
    (strategy, adapter, stack)
    for stack in STACKS
    for strategy in ("zero2", "zero3", "hybrid", "fp32")
    for adapter in ("lora", "qlora", "int8", "rslora", "dora")
]


@pytest.mark.parametrize(("strategy", "adapter", "stack"), EXACT)
def test_lora_and_its_kin_are_expressed_exactly(
    strategy: str, adapter: str, stack: str, tmp_path: Path
) -> None:
    loss = "chunked" if stack == "trl" else "plain"
    # axolotl and LLaMA-Factory load the frozen weights in the dtype that they compute in.
    follows = strategy == "fp32" and stack in ("axolotl", "llama-factory")
    fields = dict(ADAPTERS[adapter] or {})
    if follows and fields.get("base", "bf16") == "bf16":
        fields["base"] = "fp32"
    run = a_run(fields, {**STRATEGIES[strategy], "loss": loss})
    written, back = there_and_back(run, stack, tmp_path)
    assert changed_fields(run.strategy, written.applied) == {}
    assert Adapter.read(back.adapter).but(alpha=None) == run.adapter.but(alpha=None)  # type: ignore[union-attr]
    assert Adapter.read(back.adapter).scaling == run.adapter.scaling  # type: ignore[union-attr]


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("optimizer", known_optimizers())
def test_optimizers_come_back_or_are_listed(stack: str, optimizer: str, tmp_path: Path) -> None:
    job = {"seq_len": 8192, "optimizer": optimizer}
    run = large(strategy=STRATEGIES["zero3"], train=TRAIN, job=job, adapter="lora:16")
    written, back = there_and_back(run, stack, tmp_path)
    same = back.job.get("optimizer") == optimizer
    assert is_listed("job.optimizer", written.unsupported) != same


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_an_optimizer_is_read_or_listed(name: str) -> None:
    found = trainer.read({"per_device_train_batch_size": 1, "optim": name})
    if NAMES[name] in known_optimizers():
        assert found.job["optimizer"] == NAMES[name]
    else:
        assert any(s.startswith(f"optim: {name}") for s in found.unsupported)


def test_zero1_is_deepspeeds(tmp_path: Path) -> None:
    for stack in ("trl", "axolotl", "llama-factory"):
        run = a_run(ADAPTERS["lora"], {"kind": "zero1", "loss": "chunked"})
        written, back = there_and_back(run, stack, tmp_path)
        assert written.applied.kind == "zero1"
        assert back.strategy["kind"] == "zero1"


@pytest.mark.parametrize("stack", ["torchtitan", "lightning", "python"])
def test_stacks_without_adapters_refuse_them(stack: str) -> None:
    with pytest.raises(SpecError, match="adapter: "):
        export_run(large(adapter="lora:16"), stack)
    with pytest.raises(SpecError, match="adapter: "):
        StackLimits(large(adapter="lora:16"), stack)


@pytest.mark.parametrize("stack", ["accelerate", "deepspeed"])
def test_stacks_that_leave_adapters_to_the_script_say_so(stack: str) -> None:
    assert is_listed("adapter", export_run(large(adapter="lora:16"), stack).in_script)


def test_limits_are_those_of_the_stack() -> None:
    losses = ("plain", "chunked")
    run = large(adapter="qlora:16")
    assert StackLimits(run, "trl").choices("loss", losses) == ("chunked",)
    assert StackLimits(run, "axolotl").choices("loss", losses) == ("plain",)
    for stack in STACKS:
        found = StackLimits(run, stack).choices("recompute", ("none", "selective", 0.5, "full"))
        assert found == ("none", "full")


@pytest.mark.parametrize("stack", STACKS)
def test_only_axolotl_stores_experts_quantised(stack: str, tmp_path: Path) -> None:
    mixture = catalogue.model("qwen3-30b-a3b")
    adapter = Adapter(rank=16, base="nf4", targets=("q_proj",))
    run = large(adapter="qlora:16")._replace(model=mixture.but(adapter=adapter))
    written, back = there_and_back(run, stack, tmp_path)
    stores = stack == "axolotl"
    assert is_listed("adapter.quantised_experts", written.unsupported) is not stores
    again = imported_run(back, mixture, run.cluster).adapter
    assert again is not None
    assert again.quantised_experts is stores
    assert with_base_of(stack, run).adapter == again.but(alpha=None)


@pytest.mark.parametrize("name", ["openai/gpt-oss-20b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("stack", STACKS)
def test_a_preset_leaves_the_name_of_the_model_to_the_user(stack: str, name: str) -> None:
    """The package keeps configurations of presets, which no stack can load weights from."""
    written = export_run(large(model=name, adapter={"rank": 8, "targets": ["q_proj"]}), stack)
    assert str(Path(traced.__file__).parent) not in written.text
    key = {"trainer": "MODEL", "axolotl": "base_model"}.get(stack, "model_name_or_path")
    assert any(one.startswith(f"{key}: ") for one in written.in_script)


SCRIPT = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainingArguments
bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                          bnb_4bit_use_double_quant=True)
model = AutoModelForCausalLM.from_pretrained("x", dtype=torch.bfloat16, quantization_config=bits)
config = LoraConfig(r=32, lora_alpha=64, target_modules=["q_proj", "v_proj"], lora_dropout=0.1,
                    bias="none", task_type="CAUSAL_LM", layers_to_transform=[0])
model = get_peft_model(model, config)
args = TrainingArguments("out", per_device_train_batch_size=4, bf16=True, fsdp="full_shard",
                         optim="paged_adamw_32bit")
"""


def test_a_script_with_peft_is_read() -> None:
    found = torch_script.read(SCRIPT)
    adapter = Adapter.read(found.adapter)
    assert adapter == Adapter(
        rank=32, alpha=64, targets=("q_proj", "v_proj"), dropout=0.1, base="nf4"
    )
    assert any(s.startswith("LoraConfig.layers_to_transform") for s in found.unsupported)


def test_trl_has_defaults_of_its_own() -> None:
    found = trainer.read_trl({"per_device_train_batch_size": 2, "use_peft": True})
    adapter = Adapter.read(found.adapter)
    assert (adapter.rank, adapter.alpha, adapter.dropout, adapter.base) == (16, 32, 0.05, "fp32")
    assert found.job["seq_len"] == 1024
    assert found.strategy["recompute"] == "full"
    assert found.strategy["param_dtype"] == "bf16"
    # Which layers peft adapts depends on the model.
    assert any(s.startswith("lora_target_modules: absent") for s in found.unsupported)


def test_axolotl_is_read() -> None:
    found = axolotl.read(
        {
            "base_model": "x", "adapter": "qlora", "load_in_4bit": True, "lora_r": 32,
            "lora_alpha": 16, "lora_target_linear": True, "sequence_len": 4096,
            "micro_batch_size": 2, "gradient_accumulation_steps": 4, "bf16": "auto",
            "gradient_checkpointing": True, "optimizer": "adamw_torch", "learning_rate": "2e-4",
            "lr_scheduler": "cosine", "fsdp_version": 2, "dp_shard_size": 4,
            "dp_replicate_size": 2, "fsdp_config": {"reshard_after_forward": True},
            "lora_rr": 3, "wandb_project": None,
        }
    )  # fmt: skip
    expected = {"kind": "zero3", "micro_batch": 2, "accumulate": 4, "recompute": "full",
                "param_dtype": "bf16", "shard": 4, "replicate": 2}  # fmt: skip
    assert expected.items() <= found.strategy.items()
    assert Adapter.read(found.adapter) == Adapter(rank=32, alpha=16, base="nf4")
    assert found.train["learning_rate"] == 2e-4
    assert [s for s in found.unsupported if s.startswith("lora_rr: unknown")]


def test_llama_factory_is_read() -> None:
    found = llama_factory.read(
        {
            "model_name_or_path": "x", "stage": "sft", "finetuning_type": "lora", "lora_rank": 8,
            "lora_target": "q_proj,v_proj", "quantization_bit": 4, "cutoff_len": 2048,
            "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "bf16": True,
            "deepspeed": "examples/deepspeed/ds_z3_config.json", "template": "x", "lora_rankk": 1,
        }
    )  # fmt: skip
    expected = {"kind": "zero3", "micro_batch": 1, "accumulate": 8, "recompute": "full"}
    assert expected.items() <= found.strategy.items()
    adapter = Adapter.read(found.adapter)
    assert adapter.targets == ("q_proj", "v_proj")
    # LLaMA-Factory's alpha is twice the rank, as ours is.
    assert adapter.scale == 16
    assert adapter.base == "nf4"
    assert [s for s in found.unsupported if s.startswith("lora_rankk: unknown")]
    assert [s for s in found.unsupported if "ds_z3_config.json" in s]


@pytest.mark.parametrize(
    ("read", "table", "named"),
    [
        (axolotl.read, {"base_model": "x", "rl": "kto"}, "rl"),
        (axolotl.read, {"base_model": "x", "adapter": "llama-adapter"}, "adapter"),
        (axolotl.read, {"base_model": "x", "adapter": "lora", "lora_r": 0}, "lora_r"),
        (llama_factory.read, {"stage": "kto"}, "stage"),
        (llama_factory.read, {"finetuning_type": "oft"}, "finetuning_type"),
        (llama_factory.refuse_version_1, {"model": "x"}, "v1"),
    ],
)
def test_other_tasks_are_refused(read: Any, table: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError, match=named):
        read(table)


@pytest.mark.parametrize("stack", ["trl", "axolotl", "llama-factory"])
def test_a_model_of_a_hub_is_named_until_its_weights_are_there(stack: str, tmp_path: Path) -> None:
    folder = tmp_path / "models--acme--Small-1B" / "snapshots" / "0123abcd"
    folder.mkdir(parents=True)
    run = large()
    run = run._replace(model=run.model.but(config=str(folder)))
    for weights, expected in ((False, "acme/Small-1B"), (True, str(folder))):
        if weights:
            (folder / "model.safetensors").touch()
        table = yaml.safe_load(export_run(run, stack).text)
        assert table.get("model_name_or_path", table.get("base_model")) == expected
