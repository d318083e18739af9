"""Which models a script divides among devices."""

from __future__ import annotations

from shardwise.spec.model import ModelSpec
from shardwise.spec.run import RunSpec
from shardwise.stacks.write.python.model import FAMILIES, can_be_written, config_of


def why_not_divided(run: RunSpec) -> str | None:
    """Why no script divides this model in this way; None where one does."""
    strategy, spec = run.strategy, run.model
    if not isinstance(spec, ModelSpec) or spec.family not in FAMILIES:
        return "the script divides Llama, Mistral, Qwen2 and Qwen3 only; use shardwise train"
    if not strategy.sharded:
        return "the script combines it with sharding; choose zero1, zero2 or zero3"
    config = config_of(spec)
    window = config.get("sliding_window") if spec.family == "mistral" else None
    slides = isinstance(window, int) and window <= run.job.seq_len
    if slides or config.get("use_sliding_window"):
        return "the script attends to whole sequences, without windows; use shardwise train"
    if config.get("attention_dropout"):
        return "the script has no dropout in attention; use shardwise train"
    for size, name in ((spec.vocab, "vocabulary"), (spec.ffn, "width of the MLP")):
        if size % strategy.tensor:
            return f"a {name} of {size:,} is not a multiple of {strategy.tensor}"
    heads = spec.heads // strategy.tensor
    if heads % strategy.context:
        return f"Ulysses divides {heads} heads, which are not a multiple of {strategy.context}"
    if strategy.context > 1 and strategy.loss == "chunked" and not can_be_written(run):
        return "for a model that transformers builds, the script has no chunked loss; set plain"
    return None
