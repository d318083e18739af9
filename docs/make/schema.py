"""run.toml as JSON schema, for editors that complete and check TOML."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from make.fields import DRAFT, FILLED, meaning, plain
from make.values import schema_of
from shardwise.spec.adapter import Adapter
from shardwise.spec.calibration import Calibration
from shardwise.spec.cluster import ClusterSpec, DeviceSpec
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.run import SECTIONS
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
    *(ModelSpec, Adapter, ClusterSpec, DeviceSpec, Calibration, Job, Strategy),
    *(TrainSettings, ProfileSettings, MetricsSettings, CheckpointSettings, RestartSettings),
    DataSettings,
)
# What a section may be beside its table, and what fields take beside their type: readers turn
# these words into the rest.
_TEXT = {"type": "string"}
_WORDS = {
    "Strategy.kind": {"const": "hsdp"},
    "ClusterSpec.device": _TEXT,
    "TrainSettings.checkpoint": {"type": "boolean"},
    "DataSettings.path": _TEXT,
    "Adapter.targets": _TEXT,
    "Adapter.train": _TEXT,
}
_STARTS = {"preset": _TEXT, "config": _TEXT, "pretrained": _TEXT, "factory": _TEXT}


def run_schema() -> dict[str, Any]:
    """The schema of a whole file."""
    definitions = {record.__name__: _table(record) for record in RECORDS}
    named = definitions["ModelSpec"]["properties"]
    started = {
        "type": "object",
        "properties": {**named, **_STARTS},
        "additionalProperties": False,
        "anyOf": [{"required": [start]} for start in _STARTS],
    }
    sections = {
        "model": {"anyOf": [_TEXT, {"$ref": "#/$defs/ModelSpec"}, started]},
        "adapter": {"anyOf": [_TEXT, {"$ref": "#/$defs/Adapter"}]},
        "cluster": {"anyOf": [_TEXT, {"$ref": "#/$defs/ClusterSpec"}]},
        "job": {"$ref": "#/$defs/Job"},
        "strategy": {"anyOf": [_TEXT, {"$ref": "#/$defs/Strategy"}]},
        "train": {"$ref": "#/$defs/TrainSettings"},
        "data": {"$ref": "#/$defs/DataSettings"},
    }
    assert set(sections) == set(SECTIONS)
    return {
        "$schema": DRAFT,
        "title": "run.toml",
        "type": "object",
        "properties": sections,
        "required": ["model", "cluster"],
        "additionalProperties": False,
        "$defs": definitions,
    }


def _table(record: type[BaseModel]) -> dict[str, Any]:
    properties = {}
    required = []
    for key, field in record.model_fields.items():
        name = f"{record.__name__}.{key}"
        schema = schema_of(field.annotation, field.metadata)
        if name in _WORDS:
            schema = {"anyOf": [schema, _WORDS[name]]}
        properties[key] = {**schema, "description": plain(meaning(record, key))}
        if field.is_required() and name not in FILLED:
            required.append(key)
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
