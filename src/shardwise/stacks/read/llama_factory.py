"""Read the YAML of `llamafactory-cli train` as settings of a run."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.spec.adapter import ALL_LINEAR
from shardwise.spec.record import SpecError
from shardwise.stacks.attention import read_flash_attn
from shardwise.stacks.fused_loss import OTHER_KERNELS, fused_loss
from shardwise.stacks.outcomes import ABSENT, repr_text
from shardwise.stacks.read import known_keys
from shardwise.stacks.read.adapters import LoraKeys, Quantisation, set_base, set_lora, set_master
from shardwise.stacks.read.imported import Imported, Reading, boolean, positive_integer
from shardwise.stacks.read.method import as_dpo
from shardwise.stacks.read.model_name import set_model
from shardwise.stacks.read.packed import set_packing
from shardwise.stacks.read.trainer import read_arguments

_LORA = LoraKeys("lora_rank", "lora_alpha", "lora_target", "lora_dropout", "use_rslora", "use_dora",
                 "additional_target", default_alpha=None, default_targets=(ALL_LINEAR,),
                 commas=True)  # fmt: skip
_SEQ_LEN = 2048
_LOST = {
    "moe_aux_loss_coef": "set train.balance_loss; its coefficient is that of the model",
    "pissa_init": "Shardwise initialises adapters as peft does",
    "loraplus_lr_ratio": "all parameters have one learning rate in Shardwise",
    "use_galore": "Shardwise has no counterpart",
    "use_apollo": "Shardwise has no counterpart",
    "use_badam": "Shardwise has no counterpart",
    "use_adam_mini": "Shardwise has no counterpart",
    "use_llama_pro": "Shardwise has no counterpart; set adapter.train",
    "mixture_of_depths": "Shardwise has no counterpart",
    "shift_attn": "Shardwise has no counterpart",
    "use_unsloth": "Shardwise runs the model's own kernels",
    "use_unsloth_gc": "activations stay on the device in Shardwise",
    "upcast_layernorm": "norms are computed in the dtype of the model in Shardwise",
    "upcast_lmhead_output": "logits are as the model computes them in Shardwise",
    "use_dft_loss": "the loss is plain cross entropy in Shardwise",
    "use_asft_loss": "the loss is plain cross entropy in Shardwise",
    "asft_alpha": "the loss is plain cross entropy in Shardwise",
    "use_eaft_loss": "the loss is plain cross entropy in Shardwise",
    "eaft_alpha": "the loss is plain cross entropy in Shardwise",
    "fp8": "matmuls are planned in bf16",
    "fp8_backend": "matmuls are planned in bf16",
    "fp8_enable_fsdp_float8_all_gather": "parameters are gathered in bf16",
    "use_kt": "Shardwise does not compute experts on CPUs",
    "use_mca": "Shardwise plans data parallelism only",
    "use_hyper_parallel": "Shardwise plans data parallelism only",
}
LIGER = "enable_liger_kernel"
# Losses of its stage dpo that compare with no reference model.
_WITHOUT_REFERENCE = ("orpo", "simpo")
_KNOWN = (*known_keys.TRAINER, *known_keys.LLAMA_FACTORY, *_LOST, LIGER)


def is_llama_factory(table: Mapping[str, object]) -> bool:
    """Whether a table looks like a configuration of LLaMA-Factory."""
    return any(key in table for key in ("finetuning_type", "cutoff_len", "stage"))


def is_version_1(table: Mapping[str, object]) -> bool:
    """Whether a table has LLaMA-Factory's newer form, which is under its examples/v1."""
    return "model" in table and any(key in table for key in ("dist_config", "train_dataset"))


def refuse_version_1(table: Mapping[str, object]) -> Imported:
    """Raise SpecError: LLaMA-Factory's newer form cannot be read."""
    raise SpecError(
        "import: this is LLaMA-Factory's v1 form, which is not read; write the settings as its "
        "examples/train_lora do, with finetuning_type and cutoff_len"
    )


def read(table: Mapping[str, object]) -> Imported:
    """The settings of a LLaMA-Factory YAML; the launcher decides the number of processes."""
    given = {key: value for key, value in table.items() if value is not None}
    _check_task(given)
    reading = read_arguments(given, "a LLaMA-Factory configuration", _KNOWN)
    _lengths(given, reading)
    _trained(given, reading)
    _weights(given, reading)
    _recompute(given, reading)
    packs = "neat_packing" if boolean(given, "neat_packing", otherwise=False) else "packing"
    set_packing(reading, given, packs, absent=given.get("stage") == "pt")
    read_flash_attn(given, reading)
    if boolean(given, LIGER, otherwise=False):
        reading.given(LIGER, fused_loss("liger"), why=f"; {OTHER_KERNELS}")
    if boolean(given, "use_muon", otherwise=False):
        reading.lose("use_muon", "set job.optimizer")
    for key, why in _LOST.items():
        if given.get(key):
            reading.lose(key, why)
    set_model(reading, given, "model_name_or_path")
    if given.get("stage") != "dpo":
        return reading.finish()
    alone = given.get("pref_loss") in _WITHOUT_REFERENCE
    why = f"pref_loss {given['pref_loss']} has no reference model" if alone else ""
    return as_dpo(reading.finish(), "stage dpo", reference=not alone, why=why)


def _check_task(table: Mapping[str, object]) -> None:
    """Raise SpecError for stages other than sft and pt, and for files that train nothing."""
    stage = table.get("stage", "sft")
    if stage not in ("sft", "pt", "dpo"):
        raise SpecError(
            f"stage: {repr_text(stage)} is not read; Shardwise plans supervised fine-tuning, "
            "pre-training and DPO (sft, pt and dpo)"
        )
    if "do_train" in table and not boolean(table, "do_train", otherwise=True):
        raise SpecError("do_train: false trains nothing; import a configuration that trains")
    if table.get("export_dir") or table.get("infer_backend"):
        raise SpecError("import: this configuration trains nothing; import one that trains")


def _lengths(table: Mapping[str, object], reading: Reading) -> None:
    """Read the sequence length."""
    length = positive_integer(table, "cutoff_len")
    if length is None:
        reading.default("cutoff_len", {"job.seq_len": _SEQ_LEN}, _SEQ_LEN)
    else:
        reading.given("cutoff_len", {"job.seq_len": length})


def _trained(table: Mapping[str, object], reading: Reading) -> None:
    """Read which parameters are trained: all, LoRA, or some modules."""
    kind = table.get("finetuning_type", "lora")
    if kind == "lora":
        set_lora(reading, table, _LORA)
    elif kind == "freeze":
        _freeze(table, reading)
    elif kind != "full":
        raise SpecError(
            f"finetuning_type: {repr_text(kind)} is not read; known are full, lora and freeze"
        )


def _freeze(table: Mapping[str, object], reading: Reading) -> None:
    """Read freeze training: `freeze_extra_modules` into `adapter.train`.

    `freeze_trainable_layers` is always lost, given or not.
    """
    extra = str(table.get("freeze_extra_modules") or "")
    names = tuple(part.strip() for part in extra.split(",") if part.strip())
    count = table.get("freeze_trainable_layers", 2)
    blocks = (
        "how many blocks the model has is not in the file; name the trained ones in adapter.train, "
        "such as layers.31"
    )
    reading.lose(f"freeze_trainable_layers = {repr_text(count)}", blocks)
    if names:
        reading.adapter["train"] = names
        more = f": {', '.join(names)}"
        reading.given("freeze_extra_modules", {"adapter.train": ABSENT}, why=more)


def _weights(table: Mapping[str, object], reading: Reading) -> None:
    """Read how frozen weights are stored, and the dtype of trained ones."""
    bits = positive_integer(table, "quantization_bit")
    method = str(table.get("quantization_method", "bnb")).lower()
    quantised = None
    if bits in (4, 8):
        double = boolean(table, "double_quantization", otherwise=True)
        quantised = Quantisation(bits, str(table.get("quantization_type", "nf4")), double)
        if method not in ("bnb", "bitsandbytes"):
            reading.lose("quantization_method", f"{method[:20]} is planned as bitsandbytes")
    elif bits is not None:
        reading.lose("quantization_bit", f"{bits} bits are not planned; set adapter.base")
    # The model is loaded in its compute dtype; trained parameters become fp32.
    set_base(reading, reading.strategy.get("param_dtype"), quantised)
    if boolean(table, "pure_bf16", otherwise=False):
        reading.strategy |= {"param_dtype": "bf16"}
        set_master(reading, "bf16")


def _recompute(table: Mapping[str, object], reading: Reading) -> None:
    """Read activation checkpointing, which is on by default."""
    if boolean(table, "disable_gradient_checkpointing", otherwise=False):
        return
    reading.remark(
        "disable_gradient_checkpointing is not set, so every block is recomputed: recompute = "
        "full.",
        {"recompute": "full"},
    )
