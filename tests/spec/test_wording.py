"""Messages about invalid values: plain sentences, whatever is wrong, never those of pydantic."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec.calibration import Calibration
from shardwise.spec.cluster import ClusterSpec, DeviceSpec
from shardwise.spec.job import Job
from shardwise.spec.lookup import ConfigRef, ModuleRef
from shardwise.spec.model import ModelSpec
from shardwise.spec.record import Record, SpecError
from shardwise.spec.strategy import Strategy
from shardwise.spec.train import DataSettings, TrainSettings
from shardwise.spec.wording import without_key

RECORDS: list[type[Record]] = [
    *(Strategy, Job, ModelSpec, ClusterSpec, DeviceSpec, Calibration, TrainSettings, DataSettings),
    *(ModuleRef, ConfigRef),
]
# Words that pydantic uses and a person would not.
FOREIGN = re.compile(
    r"Input should|greater than or equal|less than or equal|type=|Value error|not permitted|"
    r"unable to parse|valid (dictionary|integer|string|boolean|number|tuple|list)|literal|"
    r"validation error|pydantic",
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["0", "-1", "9e9", "bf16", "zero3", "nan", "1x"]),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
    st.just(math.inf),
)


@st.composite
def tables(draw: st.DrawFn) -> tuple[type[Record], dict[str, Any]]:
    record = draw(st.sampled_from(RECORDS))
    known = st.sampled_from(sorted(record.model_fields))
    keys = st.one_of(known, known, known, st.text(max_size=10), st.just("micro-batch"))
    return record, draw(st.dictionaries(keys, VALUES, max_size=5))


@given(tables())
def test_no_message_speaks_the_words_of_pydantic(case: tuple[type[Record], dict[str, Any]]) -> None:
    record, table = case
    try:
        record.read(table, where="section")
    except SpecError as error:
        assert error.problems
        for problem in error.problems:
            assert not FOREIGN.search(problem), problem
            assert problem.startswith("section")


@pytest.mark.parametrize(
    ("record", "table", "key", "words"),
    [
        (Strategy, {"kind": "zero3", "shard": 2**20 + 1}, "shard", ["at most 1,048,576"]),
        (Strategy, {"kind": "zero3", "prefetch": 9}, "prefetch", ["at most 8", "9"]),
        (Strategy, {"kind": "zero3", "recompute": 1.5}, "recompute", ["share", "0 to 1", "1.5"]),
        (Strategy, {"kind": "zero3", "recompute": "ful"}, "recompute", ["share", "'full'?"]),
        (Strategy, {"kind": "zero3", "micro-batch": 1}, "micro-batch", ["'micro_batch'"]),
        (Strategy, {"kind": "zero3", "reshard_after_forward": "x"}, "reshard_after_forward",
         ["true or false", "whole number"]),
        (Job, {"seq_len": 0}, "seq_len", ["at least 1", "0"]),
        (Job, {"seq_len": 8, "optimizer": []}, "optimizer", ["one of", "adamw"]),
        (TrainSettings, {"learning_rate": "fast"}, "learning_rate", ["a number", "'fast'"]),
        (TrainSettings, {"checkpoint": 3}, "checkpoint", ["a table"]),
    ],
)  # fmt: skip
def test_a_sentence_names_the_key_and_what_is_allowed(
    record: type[Record], table: dict[str, Any], key: str, words: list[str]
) -> None:
    with pytest.raises(SpecError) as caught:
        record.read(table, where="here")
    [problem] = caught.value.problems
    assert problem.startswith(f"here.{key}: ")
    for word in words:
        assert word in problem


def test_a_problem_can_be_told_without_its_key() -> None:
    with pytest.raises(SpecError) as caught:
        Job.read({"seq_len": 0})
    (problem,) = caught.value.problems
    reason = without_key(problem, "seq_len")
    assert problem == f"seq_len: {reason}"
    # Where another key is asked for, or none is known, all of it is told.
    assert without_key(problem, "seq") == problem
    assert without_key("seq_len: at least 1", "seq_len") == "seq_len: at least 1"
    assert without_key(copy.copy(problem), "seq_len") == reason
