"""Which models a script can run with tensor and context parallelism."""

from __future__ import annotations

from shardwise.spec.model import ModelSpec
from shardwise.spec.run import RunSpec
from shardwise.stacks.write.python.model import FAMILIES, can_be_written, config_of


def why_not_divided(run: RunSpec) -> str | None:
    """Why no script can run this model with tensor or context parallelism; None if one can."""
    strategy, model = run.strategy, run.model
    if not isinstance(model, ModelSpec) or model.family not in FAMILIES:
        return "the script divides Llama, Mistral, Qwen2 and Qwen3 only; use shardwise train"
    if not strategy.sharded:
        return "the script combines it with sharding; choose zero1, zero2 or zero3"
    if strategy.context > 1 and strategy.loss != "plain" and not can_be_written(run):
        return "for a model that transformers builds, the script has no chunked loss; set plain"
    return _other_attention(run, model) or _uneven(run, model)


def _other_attention(run: RunSpec, model: ModelSpec) -> str | None:
    """A reason if the model needs attention that the script lacks; or None."""
    config = config_of(model)
    window = config.get("sliding_window") if model.family == "mistral" else None
    slides = isinstance(window, int) and window <= run.job.seq_len
    if slides or config.get("use_sliding_window"):
        return "the script attends to whole sequences, without windows; use shardwise train"
    if config.get("attention_dropout"):
        return "the script has no dropout in attention; use shardwise train"
    return None


def _uneven(run: RunSpec, model: ModelSpec) -> str | None:
    """A reason if a size of the model is not a multiple of its degree; or None."""
    strategy = run.strategy
    for size, name in ((model.vocab, "vocabulary"), (model.ffn, "width of the MLP")):
        if size % strategy.tensor:
            return f"a {name} of {size:,} is not a multiple of {strategy.tensor}"
    heads = model.heads // strategy.tensor
    if heads % strategy.context:
        return f"Ulysses divides {heads} heads, which are not a multiple of {strategy.context}"
    return None
