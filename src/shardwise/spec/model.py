"""The model: sizes and structure of a decoder-only transformer."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StrictBool, model_validator

from shardwise.spec.adapter import Adapter
from shardwise.spec.dtype import DType
from shardwise.spec.families import FAMILIES
from shardwise.spec.quantity import Count
from shardwise.spec.record import Record, SpecError, did_you_mean


def _printable(name: str) -> str:
    # Names are printed to terminals and written to other tools' files.
    if not name.isprintable() or not name:
        raise ValueError("must be a line of printable characters")
    return name


Name = Annotated[str, AfterValidator(_printable)]
Size = Annotated[Count, Field(ge=1, le=10**9)]
Share = Annotated[float, Field(ge=0, lt=1)]

Norm = Literal["layernorm", "rmsnorm", "rmsnorm_fp32"]
Layout = Literal["pre", "post", "sandwich", "parallel", "parallel_two_norms"]
Activation = Literal["silu", "gelu", "gelu_tanh", "gelu_new", "relu"]


class ModelSpec(Record):
    """Sizes first, then the structure that distinguishes families.

    `family` names the transformers model type this is a configuration of; it supplies every
    structural field that is not given, so a preset is little more than its sizes.
    """

    name: Name = "custom"
    family: str

    layers: Annotated[Count, Field(ge=1, le=10_000)]
    hidden: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    ffn: Size
    vocab: Size
    max_positions: Size = 2048
    tied: StrictBool = False

    norm: Norm = "rmsnorm"
    norm_parameters: Literal["weight+bias", "weight", "none"] = "weight"
    layout: Layout = "pre"
    qkv: Literal["split", "fused"] = "split"
    qk_norm: Literal["none", "head", "width"] = "none"
    mlp: Literal["plain", "gated", "gated_fused"] = "gated"
    activation: Activation = "silu"
    positions: Literal["learned", "rope", "alibi"] = "rope"
    # The base of the rotary angles; unset, the family's default.
    rope_theta: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    position_offset: Annotated[int, Field(ge=0)] = 0
    attention_bias: StrictBool = False
    output_bias: StrictBool = False
    mlp_bias: StrictBool = False
    head_bias: StrictBool = False
    # GPT-2 stores its matrices input-first, which decides which dimension is sharded.
    transposed_weights: StrictBool = False
    # Blocks attend to a window of this many tokens, except every `global_every`-th block.
    window: Size | None = None
    global_every: Size | None = None
    final_softcap: StrictBool = False
    experts: Size | None = None
    experts_per_token: Size | None = None
    dropout: Share = 0.0

    source: Annotated[str, Field(repr=False)] = ""
    # The Hugging Face configuration this was read from; with `pretrained`, training starts from the
    # weights in its folder.
    config: str | None = None
    pretrained: StrictBool = False
    # Which parameters are trained; unset, all of them.
    adapter: Adapter | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_from_family(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        filled = dict(data)
        for field, value in FAMILIES.get(str(filled.get("family")), {}).items():
            filled.setdefault(field, value)
        heads, hidden = filled.get("heads"), filled.get("hidden")
        filled.setdefault("kv_heads", heads)
        if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
            filled.setdefault("head_dim", max(1, hidden // heads))
        return filled

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = []
        if self.family not in FAMILIES:
            problems.append(
                f"family '{self.family}' is not known{did_you_mean(self.family, FAMILIES)}"
            )
        if self.heads % self.kv_heads:
            problems.append(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        if (self.experts is None) != (self.experts_per_token is None):
            problems.append("experts and experts_per_token go together")
        elif self.experts is not None and self.experts < (self.experts_per_token or 1):
            problems.append("experts_per_token cannot exceed experts")
        if self.experts is not None and self.mlp == "plain":
            problems.append("experts are modelled with a gated mlp only")
        if self.rope_theta is not None and self.positions != "rope":
            problems.append(f"rope_theta goes with rope positions, not with {self.positions} ones")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def scaled_embedding(self) -> bool:
        """Whether the embedding scales its output, as Gemma's does."""
        return self.family.startswith("gemma")

    @property
    def unquantised_experts(self) -> DType | None:
        """The dtype in which experts of a quantised base are stored; None for other models.

        That is a choice of the adapter, or of a stack that quantises linear layers alone.
        """
        adapter = self.adapter
        if self.experts is None or adapter is None or not adapter.quantised:
            return None
        if adapter.quantised_experts:
            return None
        return adapter.float_dtype

    def attends_globally(self, layer: int) -> bool:
        """Whether block `layer` attends to the full sequence, not to a window."""
        if self.window is None:
            return True
        return self.global_every is not None and (layer + 1) % self.global_every == 0

    def attention_span(self, layer: int, seq_len: int) -> int:
        """Most keys that a query of block `layer` can see."""
        if self.window is None or self.attends_globally(layer):
            return seq_len
        return min(seq_len, self.window)

    def check_seq_len(self, seq_len: int) -> None:
        """Raise SpecError if a sequence is longer than the model's learned positions.

        Other kinds of positions have no limit.
        """
        if self.positions == "learned" and seq_len > self.max_positions:
            raise SpecError(
                f"job.seq_len: {seq_len} exceeds the {self.max_positions} learned positions of "
                f"{self.name}; set model.max_positions or shorten the sequence"
            )
