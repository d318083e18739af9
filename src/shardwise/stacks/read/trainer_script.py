"""Read a script that creates TrainingArguments or a config of TRL. Nothing of it is executed."""

from __future__ import annotations

from typing import Any

from shardwise.stacks.read import trainer
from shardwise.stacks.read.imported import Imported
from shardwise.stacks.read.source import Call, Script, Unknown, why_not

# The classes of transformers and TRL, and what TRL's set where a script says nothing.
_TRL: dict[str, object] = {"gradient_checkpointing": True, "bf16": True}
ARGUMENTS: dict[str, dict[str, object]] = {
    "TrainingArguments": {},
    "Seq2SeqTrainingArguments": {},
    "SFTConfig": {**_TRL, "max_length": 1024},
    "DPOConfig": _TRL,
    "RewardConfig": _TRL,
}
_MISSING = object()


def has_arguments(script: Script) -> bool:
    return script.uses(*ARGUMENTS)


def read(script: Script) -> Imported:
    """The settings of the first call that creates training arguments."""
    call = next(script.calls(*ARGUMENTS))
    dropped: list[str] = []
    given = {key: _value(key, value, dropped) for key, value in call.keywords.items()}
    table = {key: value for key, value in given.items() if value is not _MISSING}
    defaults = {
        key: value
        for key, value in ARGUMENTS[call.name].items()
        if key not in call.keywords and not (key == "bf16" and table.get("fp16"))
    }
    if call.more:
        dropped.append(
            f"Some arguments of {call.name} come from a dictionary made when the script runs."
        )
    if len(list(script.calls(*ARGUMENTS))) > 1:
        dropped.append(
            f"The script creates arguments more than once; the first {call.name} is read."
        )
    found = trainer.read({**defaults, **table}, f"a script with {call.name}")
    notes = [
        f"{key} is absent, so TRL's default {str(value).lower()} holds."
        for key, value in defaults.items()
    ]
    # Arguments whose values are unknown are listed once, by the reason.
    unsettled = {sentence.partition(":")[0] for sentence in dropped}
    known = tuple(n for n in found.notes if n.partition(" ")[0] not in unsettled)
    return found._replace(notes=(*notes, *known), unsupported=(*dropped, *found.unsupported))


def _value(key: str, value: Any, dropped: list[str]) -> Any:
    """A value of the script as JSON has it; a value only known at run time is listed."""
    if isinstance(value, tuple) and not isinstance(value, (Unknown, Call)):
        parts = [_value(key, part, dropped) for part in value] if type(value) is tuple else None
        if parts is not None and _MISSING not in parts:
            return parts
    elif isinstance(value, dict):
        table = {name: _value(f"{key}.{name}", part, dropped) for name, part in value.items()}
        return {name: part for name, part in table.items() if part is not _MISSING}
    elif isinstance(value, Call) and value.name == "dict" and not value.args and not value.more:
        return _value(key, value.keywords, dropped)
    elif value is None or isinstance(value, (bool, int, float, str)):
        return value
    dropped.append(f"{key}: {why_not(value)}.")
    return _MISSING
