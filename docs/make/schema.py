"""run.toml as JSON schema, for editors that complete and check TOML.

Written in what all drafts since draft 6 share: editors and validators of TOML support different
ones. Tables are written where they stand, without references, so that an editor finds the meaning
of every key.
"""

from __future__ import annotations

from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel

from make.fields import DRAFT, FILLED, meaning, plain
from make.values import either, schema_of
from shardwise.spec import catalogue
from shardwise.spec.adapter import Adapter
from shardwise.spec.calibration import Calibration
from shardwise.spec.cluster import ClusterPart, ClusterSpec, DeviceSpec
from shardwise.spec.evaluation import EvalSettings
from shardwise.spec.families import FAMILIES
from shardwise.spec.instance import instances
from shardwise.spec.job import Job
from shardwise.spec.level import Level
from shardwise.spec.model import ModelSpec
from shardwise.spec.run import SECTIONS
from shardwise.spec.shares import Share
from shardwise.spec.strategy import Strategy
from shardwise.spec.train import (
    CheckpointSettings,
    DataSettings,
    MetricsSettings,
    ProfileSettings,
    RestartSettings,
    TrainSettings,
)

RECORDS: tuple[type[BaseModel], ...] = (
    *(ModelSpec, Adapter, ClusterSpec, ClusterPart, DeviceSpec, Calibration, Level, Job),
    *(Strategy, Share),
    *(TrainSettings, ProfileSettings, MetricsSettings, CheckpointSettings, RestartSettings),
    *(DataSettings, EvalSettings),
)
# What fields take beside their type: readers turn these words into the rest.
_TEXT = {"type": "string"}
_WORDS = {
    "ClusterSpec.device": _TEXT,
    "ClusterPart.device": _TEXT,
    "TrainSettings.checkpoint": {"type": "boolean"},
    "DataSettings.path": _TEXT,
    "EvalSettings.data": {"type": ["string", "array"], "items": _TEXT},
    "Adapter.targets": _TEXT,
    "Adapter.train": _TEXT,
    "Strategy.offload": {"type": ["string", "array"]},
}
# Words that readers know beyond the type of a field.
_ENUMS = {
    "Strategy.kind": lambda known: [*known, "hsdp"],
    "ModelSpec.family": lambda _: list(FAMILIES),
}
# Words that an editor offers, among others.
_OFFERED = {
    "ClusterSpec.device": lambda: list(catalogue.devices()),
    "ClusterPart.device": lambda: list(catalogue.devices()),
    "ClusterSpec.instance": lambda: list(instances()),
}
_STARTS = {
    "preset": "A model of the catalogue; fields beside it replace its own.",
    "config": "Path of a Hugging Face config.json, or of its folder.",
    "pretrained": "A folder with config.json and safetensors to start from.",
    "factory": "A function of your own that returns the module: package.module:function.",
}


def run_schema() -> dict[str, Any]:
    """The schema of a whole file."""
    sections = {
        "model": _model(),
        "adapter": either(_TEXT, _table(Adapter)),
        "cluster": _cluster(),
        "job": _job(),
        "strategy": either(_TEXT, _table(Strategy)),
        "train": _table(TrainSettings),
        "data": _table(DataSettings),
        "eval": _table(EvalSettings),
    }
    assert set(sections) == set(SECTIONS)
    return {
        "$schema": DRAFT,
        "title": "run.toml",
        "description": "One file that defines a run of Shardwise.",
        "type": "object",
        "properties": sections,
        "required": ["model", "cluster"],
        "additionalProperties": False,
    }


def _model() -> dict[str, Any]:
    """A name, a place to start from with changes to it, or every field."""
    table = _table(ModelSpec)
    fields = table["properties"]
    starts = {key: {**_TEXT, "description": told} for key, told in _STARTS.items()}
    # In a file that `plan` wrote it is a flag.
    starts["pretrained"]["type"] = ["string", "boolean"]
    named = {"enum": sorted(catalogue.model_names())}
    # Other spellings and paths are names too; an editor offers these.
    starts["preset"]["anyOf"] = [named, _TEXT]
    forms = [named, _TEXT, {"required": table.pop("required")}]
    forms += [{"required": [start]} for start in _STARTS]
    return {**either(_TEXT, {**table, "properties": {**fields, **starts}}), "anyOf": forms}


def _cluster() -> dict[str, Any]:
    """A shorthand, or a table that names its device or an instance."""
    table = _table(ClusterSpec)
    assert table.pop("required") == ["device"]
    forms = [_TEXT, {"required": ["device"]}, {"required": ["instance"]}]
    return {**either(_TEXT, table), "anyOf": forms}


def _job() -> dict[str, Any]:
    table = _table(Job)
    loss = _field(Strategy, "loss")
    table["properties"]["loss"] = {**loss, "description": "The same as loss in [strategy]."}
    # A job that only says this leaves the sequence length to the model.
    required = {"required": table.pop("required")}
    return {**table, "anyOf": [required, {"required": ["loss"], "maxProperties": 1}]}


def _table(record: type[BaseModel]) -> dict[str, Any]:
    required = [
        key
        for key, field in record.model_fields.items()
        if field.is_required() and f"{record.__name__}.{key}" not in FILLED
    ]
    return {
        "type": "object",
        "properties": {key: _field(record, key) for key in record.model_fields},
        "required": required,
        "additionalProperties": False,
    }


def _field(record: type[BaseModel], key: str) -> dict[str, Any]:
    field, name = record.model_fields[key], f"{record.__name__}.{key}"
    inner, many = _record_in(field.annotation)
    schema = _table(inner) if inner else schema_of(field.annotation, field.metadata)
    if many:
        schema = {"type": "array", "items": schema, "minItems": 1}
    if name in _WORDS:
        schema = either(_WORDS[name], schema)
    if name in _OFFERED:
        schema = {**schema, "anyOf": [{"enum": _OFFERED[name]()}, {"type": schema["type"]}]}
    if name in _ENUMS:
        schema = {"enum": _ENUMS[name](schema.get("enum", []))}
    return {**schema, "description": plain(meaning(record, key))}


def _record_in(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The record that a field holds, if it does, and whether it holds several."""
    for one in (annotation, *get_args(annotation)):
        if one in RECORDS:
            return one, False
        # A list, with or without what is said of its length.
        listed = get_args(one)[0] if get_origin(one) is Annotated else one
        if get_origin(listed) is tuple and get_args(listed)[0] in RECORDS:
            return get_args(listed)[0], True
    return None, False
