"""The `[adapter]` section: which parameters are trained, and how frozen weights are stored."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StrictBool, field_validator, model_validator

from shardwise.spec.dtype import DType
from shardwise.spec.record import Record, SpecError

Quantised = Literal["int8", "nf4"]
# How frozen weights are stored. With fp8 or a quantised dtype, only matrices of the blocks are,
# with a quantised one stacked experts too. All other frozen weights are kept in bf16. Quantised
# ones are dequantised for each product, those in fp8 are multiplied as they are.
Stored = Literal["bf16", "fp32", "fp16", "fp64", "fp8", "int8", "nf4"]
QUANTISED: tuple[Quantised, ...] = ("int8", "nf4")
ALL_LINEAR = "all-linear"

# Bytes per element: its own bits plus its share of the scales, one per 64 elements. As torchao
# stores NF4, the scales have scales too: one of 2 bytes per 256 scales.
STORED_BYTES: dict[Quantised, float] = {
    "int8": 1.0 + 4 / 64,
    "nf4": 0.5 + 1 / 64 + 2 / (64 * 256),
}
_SHORTHAND = re.compile(r"(lora|qlora|dora|qdora):([0-9]{1,5})(?::([\w.,-]+))?")


class Adapter(Record):
    """LoRA adapters, or parts of the model trained in full, or both; all else is frozen.

    - `rank`: of LoRA adapters; without it there are none.
    - `targets`: the linear layers that get one, by the last part of their name; "all-linear" is
      every one but the head.
    - `train`: parameters that are trained in full: those with one of these texts in their name.
    - `base`: how frozen weights are stored. Quantised, they are gathered as they are stored.
    """

    rank: Annotated[int, Field(ge=1, le=65536)] | None = None
    # LoRA's alpha. Unset, twice the rank.
    alpha: Annotated[float, Field(gt=0)] | None = None
    targets: tuple[str, ...] = (ALL_LINEAR,)
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    # Scale by alpha / sqrt(rank) instead of alpha / rank.
    rslora: StrictBool = False
    # DoRA: the adapter changes the direction of weights, and their magnitude is trained too.
    dora: StrictBool = False
    train: tuple[str, ...] = ()
    base: Stored = "bf16"
    # Whether a quantised base covers stacked experts. bitsandbytes replaces linear layers alone, so
    # stacks that leave it at that keep experts in bf16.
    quantised_experts: StrictBool = True

    @field_validator("targets", "train", mode="before")
    @classmethod
    def _to_tuple(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = []
        if self.rank is None and not self.train:
            problems.append("nothing is trained; give a rank for LoRA, or train for frozen subsets")
        if self.rank is None:
            given = [n for n in ("alpha", "dropout", "rslora", "dora") if getattr(self, n)]
            problems += [f"{name} belongs to LoRA; give a rank, or leave it out" for name in given]
        if not self.targets or not all(self.targets):
            problems.append("targets must name at least one linear layer, or all-linear")
        if ALL_LINEAR in self.targets and len(self.targets) > 1:
            problems.append("targets: all-linear stands alone")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def scaling(self) -> float:
        """The factor on a LoRA adapter's output: alpha / rank, or alpha / sqrt(rank) for rsLoRA."""
        assert self.rank is not None
        return self.scale / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def scale(self) -> float:
        """LoRA's alpha; twice the rank if unset."""
        return self.alpha if self.alpha is not None else 2.0 * (self.rank or 0)

    @property
    def quantised(self) -> bool:
        return self.base in QUANTISED

    @property
    def quantises_experts(self) -> bool:
        """Whether frozen stacked experts are stored quantised."""
        return self.quantised and self.quantised_experts

    @property
    def float_dtype(self) -> DType:
        """The dtype of frozen weights that are neither quantised nor in fp8."""
        low = self.quantised or self.base == "fp8"
        return "bf16" if low else self.base  # type: ignore[return-value]

    def adapts(self, name: str) -> bool:
        """Whether the linear layer with this name in transformers gets a LoRA adapter."""
        if self.rank is None:
            return False
        if self.targets == (ALL_LINEAR,):
            return name.rpartition(".")[2] not in ("lm_head", "embed_out")
        return any(name == target or name.endswith(f".{target}") for target in self.targets)

    def trains(self, name: str) -> bool:
        """Whether the model's own parameter with this name is trained in full."""
        return any(part in name for part in self.train)

    @property
    def quantised_bytes(self) -> float | None:
        """Bytes per element of a quantised weight; None if the base is not quantised."""
        return STORED_BYTES[self.base] if self.quantised else None  # type: ignore[index]

    def __str__(self) -> str:
        if self.rank is None:
            return f"trains only {', '.join(self.train)}"
        name = ("q" if self.quantised else "") + ("dora" if self.dora else "lora")
        return f"{name}:{self.rank}"


def parse_adapter(text: str) -> dict[str, Any]:
    """Adapter fields from a shorthand: `lora:16`, `qlora:16` or `lora:16:q_proj,v_proj`."""
    match = _SHORTHAND.fullmatch(text.strip().lower())
    if not match:
        raise SpecError(
            f"adapter: cannot read {text[:60]!r}; write lora:16, qlora:16 or dora:16, or with the "
            "layers that get one lora:16:q_proj,v_proj"
        )
    kind, rank, targets = match.groups()
    fields: dict[str, Any] = {"rank": int(rank)}
    if targets:
        fields["targets"] = tuple(part for part in targets.split(",") if part)
    if kind.startswith("q"):
        fields["base"] = "nf4"
    if kind.endswith("dora"):
        fields["dora"] = True
    return fields


def with_adapter(own: Adapter | None, text: str) -> Adapter:
    """The adapter of a shorthand; what it leaves open is as in `own`, the LoRA of a run."""
    fields, kept = parse_adapter(text), dict[str, Any]()
    if own is not None and own.rank is not None:
        kept = own.model_dump(exclude={"base", "dora"})
    return Adapter.read({**kept, **fields}, where="adapter")


def read_adapter(given: object) -> Adapter:
    """Read an Adapter from a shorthand or a table; raises SpecError if it is invalid."""
    if isinstance(given, Adapter):
        return given
    if isinstance(given, str):
        return Adapter.read(parse_adapter(given), where="adapter")
    if not isinstance(given, dict):
        raise SpecError(f"adapter: must be a table or a text such as lora:16, not {given!r}")
    return Adapter.read(given, where="adapter")
