"""The question of a page: options of the command line, under the same names, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, StringConstraints

from shardwise.spec import catalogue
from shardwise.spec.catalogue import traced
from shardwise.spec.cluster import ClusterSpec, parse_cluster
from shardwise.spec.hub import hub_name
from shardwise.spec.huggingface import from_config, warn_of_unused
from shardwise.spec.lookup import Lookup, Model, cluster_from_table, find_preset
from shardwise.spec.record import Record, SpecError

# A short option value, and the text of a pasted file.
Word = Annotated[str, StringConstraints(max_length=200)]
Pasted = Annotated[str, StringConstraints(max_length=2**20)]
_MOST_VALUES = 32


def _whole(value: object) -> object:
    """A float without a fraction as an int; any other value unchanged.

    In JSON, 4096.0 is the same number as 4096.
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Limits first: behind a validator, the schema that is published would not name them as limits.
Number = Annotated[int, Field(ge=-(2**63), lt=2**63), BeforeValidator(_whole)]


class Question(Record):
    """A question. A model is a name or the text of a config.json, or both: then `config` is that of
    the model which `model` names on a hub. A cluster is a shorthand, or JSON with the fields of its
    TOML table. No file is ever read, and no hub is asked."""

    # What JSON calls a number is not taken for a text, as its schema says.
    model_config = ConfigDict(strict=True)

    ask: Literal["plan", "estimate", "curve", "export"]
    model: Pasted | None = None
    config: Pasted | None = None
    cluster: Pasted | None = None
    adapter: Word | None = None
    seq_len: Number | Word | None = None
    global_batch: Number | Word | None = None
    optimizer: Word | None = None
    precision: Word | None = None
    software: Word | None = None
    loss: Word | None = None
    states: Word | None = None
    # What is kept in host memory: parameters, optimizer, activations, or several joined by a plus.
    offload: Word | None = None
    compile: bool | None = None
    # A plan: what to look for, and within which limits.
    objective: Literal["throughput", "memory", "sequence", "money"] = "throughput"
    exact_batch: bool = False
    low_precision_reduce: bool = False
    tokens: Number | Word | None = None
    price: float | Word | None = None
    deadline: float | None = None
    for_stack: Word | None = None
    # An estimate or an export: a shorthand, or the fields of a strategy.
    strategy: Word | dict[Word, Any] | None = None
    micro_batch: Number | None = None
    recompute: float | Word | None = None
    # Quantities moved away from what was asked, as `shardwise whatif --vary` names them.
    change: Annotated[dict[Word, Word], Field(max_length=8)] = Field(default_factory=dict)
    # A curve: the quantity, and its values.
    vary: Word | None = None
    values: Annotated[list[Word], Field(max_length=_MOST_VALUES)] = Field(default_factory=list)
    # Without a timeline, which takes most of an estimate's time, an answer follows a slider.
    timeline: bool = True
    # An export: the stack.
    to: Word | None = None
    # The figures of the answer before this one.
    before: Annotated[dict[Word, float], Field(max_length=64)] | None = None


def read_question(text: str | bytes) -> Question:
    """Parse and check the JSON text of a question; SpecError lists all problems."""
    try:
        data = json.loads(text)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise SpecError(f"question: is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise SpecError("question: must be a JSON object")
    return Question.read(data)


def asked_model(question: Question) -> str | Model | None:
    """The model of a question; as text where it is for `PASTED` to read."""
    if question.config is None:
        return question.model
    name = hub_name(question.model or "")
    if name is None:
        raise SpecError("config: goes with a model named as on a hub, such as Qwen/Qwen3-8B")
    return _described(question.config, name.model.rpartition("/")[2])


def _model(text: str) -> Model:
    """The model of a preset name or of the text of a config.json."""
    if text.lstrip().startswith("{"):
        return _described(text)
    if traced.named(text) is not None:
        return find_preset(text)
    if hub_name(text) is not None and text.lower() not in catalogue.hub_presets():
        raise SpecError(f"model: {text} is not in the catalogue; send its config.json as 'config'")
    return catalogue.model(text)


_EQUAL_ONLY = (
    "cluster: the page plans equal devices; for unequal parts ask the command, such as "
    'shardwise plan --cluster "1x8xH100-SXM + 1x8xA100-80GB@200Gbps"'
)


def _described(text: str, name: str = "custom") -> Model:
    """The model that the text of a config.json describes: by formulas, else by a kept trace."""
    config = _table(text, "model")
    kept = traced.matching(config)
    if kept is not None:
        return find_preset(kept)
    model = from_config(config, name)
    warn_of_unused(config)
    return model


def _cluster(text: str) -> ClusterSpec:
    """The cluster of a shorthand or of JSON with the fields of its TOML table."""
    if not text.lstrip().startswith("{"):
        if "+" in text:
            raise SpecError(_EQUAL_ONLY)
        return parse_cluster(text, catalogue.find_hardware)
    found = cluster_from_table(dict(_table(text, "cluster")))
    if found.parts is not None:
        raise SpecError(_EQUAL_ONLY)
    return found


def _table(text: str, what: str) -> Mapping[str, Any]:
    """Parse the text of a JSON object; `what` names it in errors."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{what}: is not JSON: {error}") from None
    if not isinstance(table, dict):
        raise SpecError(f"{what}: must be a JSON object")
    return table


# Finds models and clusters in the catalogue and in pasted text. It opens no file and imports no
# user's module.
PASTED = Lookup(_model, _cluster)
