"""Models without formulas whose traces are kept: a configuration and a trace for each.

`python -m benchmarks.traces` makes the traces.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
# Keys that change neither what is computed nor what is kept.
_WITHOUT_EFFECT = frozenset(
    (
        "architectures", "attn_implementation", "auto_map", "attn_factor",
        "chunk_size_feed_forward",
        "classifier_dropout", "decoder_start_token_id", "dtype", "finetuning_task", "id2label",
        "initializer_factor", "initializer_range", "initial_context_length", "is_decoder",
        "label2id", "max_length", "max_position_embeddings", "model_type", "output_attentions",
        "output_hidden_states", "problem_type", "quantization_config", "return_dict",
        "rope_parameters", "rope_scaling", "rope_theta", "swiglu_limit", "task_specific_params",
        "torch_dtype", "transformers_version", "unsloth_fixed", "use_cache",
        "partial_rotary_factor", "rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon",
    )
)  # fmt: skip
_ENDINGS = ("_token_id", "_token_index", "_eps")


@cache
def names() -> list[str]:
    """The names of all models with a kept trace."""
    return sorted(path.parent.name for path in _FOLDER.glob("*/trace.json"))


def named(text: str) -> str | None:
    """The model with a kept trace of this name, also of this name on a hub; None without one."""
    folded = {name.lower(): name for name in names()}
    on_hub = {hub.lower(): name for name, hubs in _hub_names().items() for hub in hubs}
    return folded.get(text.lower()) or on_hub.get(text.lower())


def hub_names(name: str) -> list[str]:
    """The names on a hub of a model with a kept trace; may be empty."""
    return _hub_names().get(name, [])


@cache
def _hub_names() -> dict[str, list[str]]:
    table: dict[str, list[str]] = tomllib.loads(_FOLDER.joinpath("hub.toml").read_text("utf-8"))
    return table


def config_file(name: str) -> Path:
    """The configuration of a model with a kept trace."""
    return _FOLDER / name / "config.json"


def name_of(config: Path) -> str | None:
    """The name of the kept model whose own configuration this file is; None for other files."""
    return config.parent.name if config.is_relative_to(_FOLDER) else None


@cache
def trace(name: str) -> dict[str, Any]:
    """The kept trace called `name`."""
    kept: dict[str, Any] = json.loads(_FOLDER.joinpath(name, "trace.json").read_bytes())
    return kept


def matching(config: Mapping[str, Any]) -> str | None:
    """The name of a kept model that computes the same as `config`; None without one.

    A configuration computes the same if it gives every value in which the kept one differs from
    the defaults of transformers, and no other value than the kept one's.
    """
    kind = str(config.get("model_type"))
    for name in _kinds().get(kind, []):
        kept = trace(name)
        if _gives(config, relevant(kept["differs"])) and _agrees(config, kept["values"]):
            return name
    return None


def relevant(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a configuration that change what is computed or kept."""
    return {
        key: relevant(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in _WITHOUT_EFFECT and not key.startswith("_") and not key.endswith(_ENDINGS)
    }


@cache
def _kinds() -> dict[str, list[str]]:
    """The names of kept models by model type."""
    kinds: dict[str, list[str]] = {}
    for name in names():
        table = json.loads(config_file(name).read_bytes())
        kinds.setdefault(str(table["model_type"]), []).append(name)
    return kinds


def _gives(config: Mapping[str, Any], differs: Mapping[str, Any]) -> bool:
    """Whether a configuration has every value of `differs`."""
    return all(
        isinstance(config.get(key), Mapping) and _gives(config[key], value)
        if isinstance(value, Mapping)
        else key in config and config[key] == value
        for key, value in differs.items()
    )


def _agrees(config: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Whether no value of a configuration is another than in `values`; unknown keys disagree.

    An empty list leaves a value to the class, as Llama 4's `no_rope_layers` does.
    """
    return all(
        value == []
        or (
            key in values
            and (
                isinstance(values[key], Mapping) and _agrees(value, values[key])
                if isinstance(value, Mapping)
                else values[key] == value
            )
        )
        for key, value in relevant(config).items()
    )
