"""Read which model another stack's file trains, by its name on a hub or its folder."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.stacks.outcomes import Outcome, repr_text
from shardwise.stacks.read.imported import Reading
from shardwise.stacks.read.source import Call, Script, unused_reason

# Longest name that is kept; a hub allows 96 characters on each side of the slash.
_LENGTH = 500
# The argument that names the model, by the function that loads it.
_NAMES = ("pretrained_model_name_or_path", "model_name", "model_name_or_path")
_MODEL = "model"
# Classes with `from_pretrained` that load no model.
_OTHERS = ("Tokenizer", "Processor", "FeatureExtractor", "Config", "Peft")


def set_model(reading: Reading, table: Mapping[str, object], key: str) -> None:
    """Set the model's name from a key of a table; do nothing if it is absent."""
    name = table.get(key)
    if name is None:
        return
    if _is_name(name):
        _name(reading, key, str(name).strip())
    else:
        reading.lose(key, f"{repr_text(name)} is not the name or folder of a model; give the model")


def set_model_of_script(script: Script, reading: Reading) -> None:
    """Set the model's name from the call that loads the model, or that hands it to a trainer.

    A name known only at run time is reported as lost.
    """
    unknown: object = None
    for call, name in _named(script):
        if isinstance(name, str) and _is_name(name):
            _name(reading, call.name, name.strip())
            return
        unknown = name if unknown is None else unknown
    if unknown is not None and not isinstance(unknown, Call):
        reading.lose(_MODEL, f"{unused_reason(unknown)}; give the model")


def _name(reading: Reading, key: str, name: str) -> None:
    """Set the model's name, which `key` of the file gives."""
    named = f"{key} names the model {repr_text(name)}."
    reading.record(Outcome("given", key, name, {_MODEL: name}, named, "sentence"))


def _named(script: Script) -> list[tuple[Call, object]]:
    """The calls that name the model, those that load it first, each with the name's value."""
    loads = [call for call in script.calls("from_pretrained") if _loads_model(call)]
    found = [(call, _first(call, _NAMES)) for call in loads]
    found += [(call, call.get(_MODEL, 0)) for call in script.calls(*_trainers(script))]
    return [(call, name) for call, name in found if name is not None]


def _first(call: Call, names: tuple[str, ...]) -> object:
    """The argument under the first of these names that is given, or else the first position."""
    given = (call.get(name) for name in names)
    position = call.args[0] if call.args else None
    return next((value for value in given if value is not None), position)


def _loads_model(call: Call) -> bool:
    """Whether a call of `from_pretrained` loads a model, and not its tokenizer or configuration."""
    owner = call.origin.rpartition(".")[0].rpartition(".")[2]
    return not any(word in owner for word in _OTHERS)


def _trainers(script: Script) -> tuple[str, ...]:
    """The names of called classes that end in `Trainer`, which TRL gives the model's name."""
    return tuple(dict.fromkeys(name for name in script.called() if name.endswith("Trainer")))


def _is_name(value: object) -> bool:
    """Whether a value can be the name or folder of a model.

    A colon would name a Python function, which a file of others must not make us call.
    """
    text = value.strip() if isinstance(value, str) else ""
    return bool(text) and len(text) <= _LENGTH and text.isprintable() and ":" not in text
