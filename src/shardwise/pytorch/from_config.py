"""Build a model from its Hugging Face configuration with transformers' own classes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwise.pytorch.quiet_libraries import quiet_imports, silence_transformers
from shardwise.spec.families import FAMILIES
from shardwise.spec.hub import stay_offline
from shardwise.spec.record import SpecError, SpecWarning

# Mappings of transformers from a configuration to a class, by preference, for files that do not
# name their class in `architectures`.
_MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_PRETRAINING_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
)
# Token id that shifted labels start with in encoder-decoders whose file leaves it out.
_FIRST_TOKEN = 0


def model_from_config(
    table: Mapping[str, Any], name: str, attention: tuple[str, ...] = ("sdpa", "eager")
) -> nn.Module:
    """The module that transformers builds for a `config.json`, in training mode and fp32.

    Takes the first kind of `attention` that the class supports. Code of a model's folder is never
    run. Parts that text does not pass through, such as a vision tower, are frozen. Raises SpecError
    with the reason if transformers cannot build it.
    """
    stay_offline()
    try:
        import transformers
    except ModuleNotFoundError:
        raise SpecError(
            f"model: building {name} needs transformers; install it with "
            "'pip install shardwise[hf]'"
        ) from None
    silence_transformers()
    try:
        with quiet_imports():
            made = _class_of(table)
            if made is None:
                raise ValueError(
                    f"transformers {transformers.__version__} has no model for model type "
                    f"'{str(table.get('model_type'))[:60]}'"
                )
            try:
                module = _built(made, table, attention)
            except ImportError as error:
                # A vision or sound tower of a library that is missing.
                module = _text_part(table, name, attention, error)
    except (ValueError, TypeError, KeyError, AttributeError, OSError, ImportError) as error:
        if "auto_map" in table:
            raise SpecError(
                f"model: {name} is made by code in its own folder, which is never run; write "
                "a function that returns the nn.Module, and give it as --model package.module:name"
            ) from error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SpecError(f"model: transformers cannot build {name}: {reason}") from error
    _freeze_beside_text(module)
    return module.train()


def _text_part(
    table: Mapping[str, Any], name: str, attention: tuple[str, ...], error: ImportError
) -> nn.Module:
    """The causal language model of a multimodal configuration; raises `error` without one."""
    text = table.get("text_config")
    made = _class_of({"model_type": text.get("model_type")}) if isinstance(text, dict) else None
    if made is None or not isinstance(text, dict):
        raise error
    reason = str(error).strip().splitlines()[0][:200]
    warnings.warn(
        f"model: of {name} only the text part is built: {reason}", SpecWarning, stacklevel=2
    )
    return _built(made, text, attention)


def _built(made: Any, table: Mapping[str, Any], attention: tuple[str, ...]) -> nn.Module:
    """An instance with the first kind of attention that its class supports."""
    refused: ValueError | None = None
    text = table.get("text_config")
    if made.config_class.model_type != table.get("model_type") and isinstance(text, dict):
        # A class of the text part alone.
        table = text
    for kind in attention:
        config = made.config_class.from_dict(dict(table), attn_implementation=kind)
        config.use_cache = False
        if getattr(config, "is_encoder_decoder", False) and not hasattr(
            config, "decoder_start_token_id"
        ):
            config.decoder_start_token_id = getattr(config, "pad_token_id", None) or _FIRST_TOKEN
        try:
            module: nn.Module = made(config)
            return module
        except ValueError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _class_of(table: Mapping[str, Any]) -> Any:
    """The class of transformers that a configuration names, else the usual one for its type.

    A type with formulas is always a causal language model. None if transformers has neither.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    kind = str(table.get("model_type"))
    names = None if kind in FAMILIES else table.get("architectures")
    for name in names if isinstance(names, list) else []:
        made = getattr(transformers, str(name), None)
        if isinstance(made, type) and issubclass(made, transformers.PreTrainedModel):
            return made
    if kind not in transformers.CONFIG_MAPPING:
        return None
    config = transformers.CONFIG_MAPPING[kind]
    for mapping in _MAPPINGS:
        made = getattr(modeling_auto, mapping, {}).get(config, None)
        if made is not None:
            return made[0] if isinstance(made, tuple) else made
    return None


def _freeze_beside_text(module: Any) -> None:
    """Freeze the parameters of a multimodal model that text alone does not pass through."""
    config = module.config
    if config.get_text_config() is config or getattr(config, "is_encoder_decoder", False):
        return
    text, head = module.get_decoder(), module.get_output_embeddings()
    if text is module or not isinstance(text, nn.Module):
        return
    trained = {id(p) for part in (text, head) if part is not None for p in part.parameters()}
    for parameter in module.parameters():
        parameter.requires_grad_(id(parameter) in trained)
