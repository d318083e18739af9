"""Read LoRA and quantised weights of other stacks as the fields of an Adapter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from shardwise.spec.adapter import ALL_LINEAR, Adapter
from shardwise.spec.dtype import TORCH_NAMES
from shardwise.spec.lookup import Model, may_have_experts
from shardwise.spec.record import SpecError
from shardwise.stacks.outcomes import ABSENT, plain_text, repr_text
from shardwise.stacks.read.imported import Reading, boolean, finite_number, positive_integer

# The layers that peft adapts by default in Llama and most other models.
PEFT_TARGETS = ("q_proj", "v_proj")
_ALL = (ALL_LINEAR, "all", "all_linear")
_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
_DTYPES = {theirs: ours for ours, theirs in TORCH_NAMES.items()}


class LoraKeys(NamedTuple):
    """A stack's keys for the settings of LoRA, and its defaults."""

    rank: str = "r"
    alpha: str = "lora_alpha"
    targets: str = "target_modules"
    dropout: str = "lora_dropout"
    rslora: str = "use_rslora"
    dora: str = "use_dora"
    train: str = "modules_to_save"
    default_rank: int = 8
    # None means twice the rank.
    default_alpha: float | None = 8
    default_dropout: float = 0.0
    default_targets: tuple[str, ...] | None = None
    # Whether a text holds names separated by commas; otherwise a text is one name or pattern.
    commas: bool = False


def set_lora(reading: Reading, table: Mapping[str, object], keys: LoraKeys) -> None:
    """Set the adapter of `reading` from a table that asks for LoRA."""
    rank = positive_integer(table, keys.rank)
    if rank is None:
        rank = keys.default_rank
        reading.default(keys.rank, {}, rank)
    alpha = finite_number(table, keys.alpha)
    dropout = finite_number(table, keys.dropout)
    reading.adapter["rank"] = rank
    if alpha is None:
        alpha = keys.default_alpha
    if alpha is not None:
        reading.adapter["alpha"] = alpha
    reading.adapter["targets"] = _targets(reading, table.get(keys.targets), keys)
    reading.adapter["dropout"] = keys.default_dropout if dropout is None else dropout
    for field, key in (("rslora", keys.rslora), ("dora", keys.dora)):
        if boolean(table, key, otherwise=False):
            reading.given(key, {f"adapter.{field}": True})
    trained = _names(table.get(keys.train), keys)
    if trained:
        reading.adapter["train"] = trained
        more = f": {', '.join(trained)} are trained"
        reading.given(keys.train, {"adapter.train": ABSENT}, why=more)
    scale = f"{alpha:g}" if alpha is not None else f"{2 * rank} (twice the rank)"
    reading.given("LoRA", {"adapter.rank": rank}, why=f", alpha = {scale}")


def _names(given: object, keys: LoraKeys) -> tuple[str, ...]:
    """The names of layers in a value: a text, a list of texts, or None (empty)."""
    if given is None:
        return ()
    if isinstance(given, str):
        parts = given.split(",") if keys.commas else [given]
        return tuple(part.strip() for part in parts if part.strip())
    if isinstance(given, (list, tuple)) and all(isinstance(part, str) for part in given):
        return tuple(given)
    raise SpecError(f"{keys.targets}: must be names of layers, not {repr_text(given)}")


def _targets(reading: Reading, given: object, keys: LoraKeys) -> tuple[str, ...]:
    """The layers that get adapters.

    If the file names none, the stack's default. A pattern is read as all linear layers.
    """
    names = _names(given, keys)
    if not names and keys.default_targets is not None:
        return keys.default_targets
    if not names:
        reading.lose(
            keys.targets,
            "absent, so peft adapts the layers that it has for the model's family; read as those "
            f"of Llama, {' and '.join(PEFT_TARGETS)}: set adapter.targets",
        )
        return PEFT_TARGETS
    if len(names) == 1 and names[0] in _ALL:
        return (ALL_LINEAR,)
    if all(_NAME.fullmatch(name) for name in names):
        return names
    pattern = next(name for name in names if not _NAME.fullmatch(name))
    reading.lose(
        keys.targets,
        f"{repr_text(pattern)} is a pattern; read as {ALL_LINEAR}: set adapter.targets, which "
        "takes names of layers",
    )
    return (ALL_LINEAR,)


class Quantisation(NamedTuple):
    """The format in which bitsandbytes stores frozen weights."""

    bits: int
    kind: str = "nf4"
    # Whether the scales of 4-bit blocks are quantised too.
    double: bool = True


def adapter_for(fields: Mapping[str, object], model: Model) -> Adapter:
    """The adapter of a file for a model.

    bitsandbytes quantises linear layers alone: experts stay in 16 bits unless the file says
    otherwise.
    """
    adapter = Adapter.read(fields, where="adapter")
    if adapter.quantises_experts and may_have_experts(model):
        stored = fields.get("quantised_experts") is True
        return adapter.but(quantised_experts=stored)
    return adapter


def set_base(reading: Reading, loaded: object, quantised: Quantisation | None = None) -> None:
    """Set `adapter.base`, the format of frozen weights.

    `loaded` is the dtype that the model is loaded in; it is used without `quantised`.
    """
    if not reading.adapter:
        if quantised is not None:
            reading.lose(
                f"load_in_{quantised.bits}bit",
                "quantised weights cannot be trained; give an adapter, or load the model in bf16",
            )
        return
    if quantised is None:
        reading.adapter["base"] = loaded_dtype(reading, loaded) or "bf16"
        return
    if quantised.bits == 8:
        reading.remark("8-bit weights become adapter.base = int8.", {"adapter.base": "int8"})
        return
    reading.remark("4-bit weights become adapter.base = nf4.", {"adapter.base": "nf4"})
    if quantised.kind != "nf4":
        same = "4-bit weights are planned as nf4, of the same size"
        reading.lose(quantised.kind[:20], same)
    if not quantised.double:
        reading.lose(
            "Scales of 4-bit blocks",
            "bitsandbytes keeps them in fp32 without double quantisation; planned as quantised, "
            "0.05 bytes per weight less",
        )


def loaded_dtype(reading: Reading, given: object) -> str | None:
    """The short name, such as "bf16", of the dtype that a model is loaded in.

    None if it is absent, or unknown to Shardwise, which is reported.
    """
    name = plain_text(given).removeprefix("torch.")
    if given is None:
        return None
    if name == "auto":
        reading.remark("dtype auto takes that of the checkpoint, here bf16.")
        return "bf16"
    short = _DTYPES.get(name, name if name in TORCH_NAMES else None)
    if short is None:
        reading.lose(
            "dtype", f"{repr_text(given)} is not a dtype that Shardwise knows; read as bf16"
        )
    return short


def set_master(reading: Reading, loaded: str | None) -> None:
    """Set the dtypes for full training of a model that is loaded in bf16 or fp16.

    Trained parameters keep the dtype they are loaded in. No change with adapters, nor with sharding
    and mixed precision: there accelerate's FSDP2 makes parameters fp32.
    """
    strategy = reading.strategy
    sharded = strategy.get("kind") not in ("ddp", "single")
    if reading.adapter or loaded not in ("bf16", "fp16"):
        return
    mixed = strategy.get("param_dtype", "fp32") != "fp32"
    if sharded and mixed:
        return
    strategy |= {"master_dtype": loaded, "reduce_dtype": loaded}
    if not mixed:
        strategy["param_dtype"] = loaded
    reading.remark(f"The model is loaded in {loaded}: master_dtype = {loaded}.")
