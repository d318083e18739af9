"""Text becomes tokens once, from every kind of file, and is read back across shards."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.spec.record import SpecError
from shardwise.spec.train import DataSettings

pytest.importorskip("torch")

from shardwise.trainer.data.batches import Layout, SyntheticBatches, make_batches
from shardwise.trainer.data.shards import TokenShards, write_shards
from shardwise.trainer.data.tokenize import tokenized

TEXT = "Every happy family is alike.\nEvery unhappy family is not — naïve.\n"


def settings(folder: Path, *files: Path, **more: Any) -> DataSettings:
    paths = tuple(str(file) for file in files)
    return DataSettings.read({"path": paths, "cache": str(folder / "cache"), **more})


def read_all(data: DataSettings) -> bytes:
    shards = tokenized(data)
    return bytes(shards.read(0, len(shards)).astype(np.uint8))


def test_a_text_file_is_its_bytes(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(TEXT, encoding="utf-8")
    assert read_all(settings(tmp_path, file)) == TEXT.encode()


def test_documents_are_closed(tmp_path: Path) -> None:
    lines, table = tmp_path / "a.jsonl", tmp_path / "b.parquet"
    lines.write_text("\n".join(json.dumps({"text": t}) for t in ("one", "two")) + "\n\n")
    assert read_all(settings(tmp_path, lines)) == b"one\xfftwo\xff"
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"body": ["drei", "vier"]}), table)
    assert read_all(settings(tmp_path, table, text_key="body")) == b"drei\xffvier\xff"


def test_a_folder_is_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "b.txt").write_text("second")
    (tmp_path / "texts" / "a.txt").write_text("first")
    assert read_all(settings(tmp_path, tmp_path / "texts")) == b"first\xffsecond\xff"


def test_a_tokenizer_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "Every": 1, "family": 2, "</s>": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps({"text": "Every happy family"}) + "\n")
    shards = tokenized(settings(tmp_path, lines, tokenizer=str(tmp_path)))
    assert shards.read(0, len(shards)).tolist() == [1, 0, 2, 3]


def test_it_is_done_once_and_again_when_the_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(TEXT)
    data = settings(tmp_path, file)
    tokenized(data)
    (kept,) = (tmp_path / "cache").iterdir()
    before = kept.stat().st_mtime_ns
    tokenized(data)
    assert kept.stat().st_mtime_ns == before
    file.write_text("something else altogether")
    assert read_all(data) == b"something else altogether"
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_shards_read_as_one_array(tmp_path: Path) -> None:
    chunks = [np.arange(start, start + 7, dtype=np.uint16) for start in range(0, 70, 7)]
    write_shards(tmp_path / "made", chunks, {"vocab": 100}, shard_tokens=16)
    shards = TokenShards(tmp_path / "made")
    assert len(shards) == 70
    assert shards.read(0, 70).tolist() == list(range(70))
    assert shards.read(14, 20).tolist() == list(range(14, 34))
    last = sorted((tmp_path / "made").glob("*.bin"))[-1]
    last.write_bytes(last.read_bytes()[:-2])
    with pytest.raises(SpecError, match=last.name):
        TokenShards(tmp_path / "made")


def test_targets_follow_their_inputs(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("".join(chr(ord("a") + i % 26) for i in range(33)))
    layout = Layout(rank=0, world=1, micro_batch=2, accumulate=2, seq_len=8)
    parts = make_batches(settings(tmp_path, file), layout, 256, seed=0).at(0)
    assert [tuple(part.inputs.shape) for part in parts] == [(2, 8), (2, 8)]
    starts = []
    for part in parts:
        assert ((part.targets - part.inputs - 1) % 26 == 0).all()
        assert part.tokens == 16
        starts += part.inputs[:, 0].tolist()
    # Four sequences of eight make the whole text, each once.
    assert sorted(starts) == sorted(ord("a") + (8 * i) % 26 for i in range(4))


def test_synthetic_sequences_can_be_learned() -> None:
    layout = Layout(rank=0, world=1, micro_batch=4, accumulate=1, seq_len=100)
    batch = SyntheticBatches(layout, 256, seed=0).at(3)[0]
    again = SyntheticBatches(layout, 256, seed=0).at(3)[0]
    assert (batch.inputs == again.inputs).all()
    steps = (batch.targets - batch.inputs) % 256
    usual = steps.mode(dim=1).values
    assert ((usual >= 1) & (usual <= 8)).all()
    assert 0.8 < (steps == usual[:, None]).float().mean() < 0.98


@pytest.mark.parametrize(
    ("name", "text", "more", "key", "named"),
    [
        ("a.txt", None, {}, "data.path", "a.txt"),
        ("a.csv", "x", {}, "data.path", "a.csv"),
        ("a.jsonl", '{"body": "x"}\n', {}, "data.path", "line 1 of .*a.jsonl.*'text'"),
        ("a.jsonl", "not json\n", {}, "data.path", "line 1 of .*a.jsonl"),
        pytest.param(
            "a.jsonl",
            f'{{"text": {"9" * 5_000}}}\n',
            {},
            "data.path",
            "line 1 of .*a.jsonl",
            id="digits",
        ),
        pytest.param(
            "a.jsonl", f"{'[' * 100_000}\n", {}, "data.path", "line 1 of .*a.jsonl", id="brackets"
        ),
        ("a.jsonl", f'{{"text": {"9" * 5_000}}}\n', {}, "data.path", "line 1 of .*a.jsonl"),
        ("a.jsonl", f"{'[' * 100_000}\n", {}, "data.path", "line 1 of .*a.jsonl"),
        ("a.parquet", "not parquet", {}, "data.path", "a.parquet"),
        ("a.txt", "short", {}, "data.path", "5 tokens.* 64"),
        ("a.txt", TEXT, {"tokenizer": "nowhere"}, "data.tokenizer", "nowhere"),
    ],
)
def test_what_cannot_be_read_says_why(
    tmp_path: Path, name: str, text: str | None, more: dict[str, Any], key: str, named: str
) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    layout = Layout(rank=0, world=1, micro_batch=1, accumulate=1, seq_len=64)
    with pytest.raises(SpecError, match=f"^{key}: .*{named}"):
        make_batches(settings(tmp_path, file, **more), layout, 256, seed=0)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("null", "null"), ("NaN", "a number"), ("7", "a number"), ("true", "true or false"),
        ('{"a": 1}', "an object"), ('["a"]', "a list"), (r'"\ud800"', "surrogate"),
    ],
)  # fmt: skip
def test_what_is_not_text_is_never_trained_on(tmp_path: Path, value: str, kind: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"text": "good"}}\n\n{{"text": {value}}}\n')
    with pytest.raises(SpecError, match=f"^data.path: .*'text' in line 3 of {file} .*{kind}"):
        tokenized(settings(tmp_path, file))


def test_a_column_that_is_not_text_is_never_trained_on(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "a.parquet"
    for value, kind in [(None, "null"), (["a"], "a list"), (b"a", "binary"), (1.5, "a number"),
                        ({"a": 1}, "an object")]:  # fmt: skip
        column = ["good"] * 600 + [None] if value is None else [value]
        parquet.write_table(pyarrow.table({"text": column}), file)
        with pytest.raises(SpecError, match=f"'text' in row {len(column)} of .* is {kind}"):
            tokenized(settings(tmp_path, file))


def test_a_record_without_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.trainer.data.documents.LONGEST_LINE", 64)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "' + "a" * 100)
    with pytest.raises(SpecError, match=r"line 2 of .* is longer than 64"):
        tokenized(settings(tmp_path, tmp_path / "a.jsonl"))
    # Plain text may be one line.
    (tmp_path / "a.txt").write_text("a" * 100)
    assert read_all(settings(tmp_path, tmp_path / "a.txt")) == b"a" * 100
    os.mkfifo(tmp_path / "b.jsonl")
    with pytest.raises(SpecError, match=r"b\.jsonl is not a regular file"):
        tokenized(settings(tmp_path, tmp_path / "b.jsonl"))


def test_a_tokenizer_too_large_for_the_model(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    layout = Layout(rank=0, world=1, micro_batch=1, accumulate=1, seq_len=8)
    with pytest.raises(SpecError, match=r"^data\.tokenizer: .*256.*100"):
        make_batches(settings(tmp_path, tmp_path / "a.txt"), layout, 100, seed=0)
