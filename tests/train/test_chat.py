"""Chat examples: their shapes, what counts for the loss, and how they fill sequences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec.record import SpecError
from shardwise.spec.train import DataSettings

pytest.importorskip("torch")

from shardwise.engine.head_with_loss import IGNORED
from shardwise.trainer.data import packing
from shardwise.trainer.data.batches import ExampleBatches, Layout, TokenBatches, make_batches
from shardwise.trainer.data.chat import Conversation, messages_of
from shardwise.trainer.data.chat_template import TokenizerTemplate
from shardwise.trainer.data.packing import Sequences, best_fit

ASKED = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]
TURN = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}</s> {% endfor %}"
PROMPT = "{% if add_generation_prompt %}<s>assistant {% endif %}"
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<s>assistant "
    "{% generation %}{{ m.content }}</s>{% endgeneration %} {% else %}"
    "<s>{{ m.role }} {{ m.content }}</s> {% endif %}{% endfor %}"
)


def write(folder: Path, *records: Any) -> Path:
    file = folder / "chat.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def settings(folder: Path, **more: Any) -> DataSettings:
    file = str(folder / "chat.jsonl")
    return DataSettings.read({"path": file, "cache": str(folder / "cache"), **more})


def answer(length: int, prompt: str = "q") -> dict[str, str]:
    return {"prompt": prompt, "completion": "a" * length}


# With one token per byte: "user:\n" + prompt + "\n" + "assistant:\n" + answer + end.
AROUND = len("user:\nq\nassistant:\n") + 1


@pytest.mark.parametrize(
    "record",
    [
        {"messages": ASKED},
        {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yes."}]},
        {"prompt": "Hi?", "completion": "Yes."},
        {"prompt": ASKED[:1], "completion": ASKED[1:]},
        {"instruction": "Hi?", "output": "Yes."},
        {"instruction": "Hi?", "input": "", "output": "Yes."},
    ],
    ids="-".join,
)
def test_every_shape_is_the_same_conversation(record: dict[str, Any]) -> None:
    assert messages_of(record, "here") == ASKED


def test_an_input_follows_its_instruction() -> None:
    record = {"instruction": "Add.", "input": "1 2", "output": "3"}
    assert messages_of(record, "here")[0]["content"] == "Add.\n\n1 2"


def test_answers_and_their_end_count(tmp_path: Path) -> None:
    write(tmp_path, {"messages": [*ASKED, *ASKED]})
    inputs, targets, positions = Sequences(settings(tmp_path), 64).read(0)
    text = b"user:\nHi?\nassistant:\nYes.\xffuser:\nHi?\nassistant:\nYes.\xff"
    assert bytes(inputs[: len(text) - 1].astype(np.uint8)) == text[:-1]
    counted = targets[targets != IGNORED]
    assert bytes(counted.astype(np.uint8)) == b"Yes.\xffYes.\xff"
    assert (targets[: len(text) - 1] == IGNORED).sum() == len(text) - 1 - 10
    assert positions[: len(text) - 1].tolist() == list(range(len(text) - 1))

    _, targets, _ = Sequences(settings(tmp_path, loss_on="all"), 64).read(0)
    assert bytes(targets[targets != IGNORED].astype(np.uint8)) == text[1:]


def tokenizer_folder(folder: Path, template: str) -> Path:
    """A tokenizer of words, as transformers saves it, with a chat template."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = ["[UNK]", "<s>", "</s>", "user", "assistant", "system"]
    words += ["one", "two", "three", "four", "five"]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="[UNK]"
    )
    library.chat_template = template
    library.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("template", [TURN + PROMPT, MARKED], ids=["rendered", "marked"])
def test_a_tokenizers_own_template(tmp_path: Path, template: str) -> None:
    found = TokenizerTemplate(tokenizer_folder(tmp_path, template))
    messages = [
        {"role": "system", "content": "five"},
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": "three"},
        # The answer is part of the question: it is not found there.
        {"role": "user", "content": "four three"},
        {"role": "assistant", "content": "four three"},
    ]
    [example] = found.encode([Conversation(messages, "here")])
    shown = found._library.convert_ids_to_tokens(example.ids.tolist())
    assert " ".join(shown) == (
        "<s> system five </s> <s> user one two </s> <s> assistant three </s> "
        "<s> user four three </s> <s> assistant four three </s>"
    )
    answers = [word for word, counts in zip(shown, example.answers, strict=True) if counts]
    assert answers == ["three", "</s>", "four", "three", "</s>"]


def test_a_template_that_shows_earlier_answers_otherwise(tmp_path: Path) -> None:
    """As templates do that drop the thoughts of all answers but the last."""
    template = (
        "{% for m in messages %}<s>{{ m.role }} "
        "{% if loop.last and m.role == 'assistant' %}five {% endif %}"
        "{{ m.content }}</s> {% endfor %}" + PROMPT
    )
    found = TokenizerTemplate(tokenizer_folder(tmp_path, template))
    messages = [
        {"role": role, "content": word}
        for role, word in (
            ("user", "one"),
            ("assistant", "two"),
            ("user", "three"),
            ("assistant", "four"),
        )
    ]
    [example] = found.encode([Conversation(messages, "here")])
    shown = found._library.convert_ids_to_tokens(example.ids[example.answers].tolist())
    assert shown == ["two", "</s>", "five", "four", "</s>"]


def test_a_tokenizer_with_a_template_in_a_run(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer", TURN + PROMPT)
    write(tmp_path, {"prompt": "one", "completion": "two"})
    inputs, targets, _ = Sequences(settings(tmp_path, tokenizer=str(folder)), 8).read(0)
    assert inputs.tolist() == [1, 3, 6, 2, 1, 4, 7, 0]
    assert targets.tolist() == [*[IGNORED] * 5, 7, 2, IGNORED]


@given(st.lists(st.integers(1, 50), max_size=200), st.integers(50, 80))
def test_groups_hold_every_index_once(lengths: list[int], room: int) -> None:
    groups = best_fit(np.asarray(lengths, dtype=np.int64), room)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in group) <= room for group in groups)
    # Two groups never fit into one.
    sums = sorted(sum(lengths[index] for index in group) for group in groups)
    assert len(sums) < 2 or sums[0] + sums[1] > room


@pytest.mark.parametrize("window", [1, 100, 2**22])
def test_every_example_is_in_one_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(packing, "WINDOW_TOKENS", window)
    lengths = [3, 40, 7, 1, 90, 12, 12, 30, 5, 64]
    write(tmp_path, *(answer(n) for n in lengths))
    sequences = Sequences(settings(tmp_path), 128)
    found = []
    for number in range(len(sequences)):
        _, targets, positions = sequences.read(number)
        begins = np.flatnonzero(positions == 0)
        for first, last in zip(begins, [*begins[1:], 128], strict=True):
            assert positions[first:last].tolist() == list(range(last - first))
            # The answer and its end; padding has none.
            counted = int((targets[first:last] != IGNORED).sum())
            found += [counted - 1] if counted else []
    assert sorted(found) == sorted(lengths)
    total = sum(lengths) + len(lengths) * AROUND
    statistics = sequences.statistics
    assert (statistics.examples, statistics.tokens) == (len(lengths), total)
    assert statistics.loss_tokens == sum(lengths) + len(lengths)
    assert (statistics.median, statistics.longest) == (12 + AROUND, 90 + AROUND)
    # The last token of an example takes no position.
    expected = (total - len(lengths)) / (128 * len(sequences))
    assert statistics.filled == pytest.approx(expected)
    if window == 1:
        assert len(sequences) == len(lengths)


def test_what_is_too_long_is_cut_and_what_has_no_answer_is_dropped(tmp_path: Path) -> None:
    exact = 33 - AROUND
    questions = {"messages": ASKED[:1]}
    write(tmp_path, answer(exact), answer(exact + 1), answer(5, "q" * 40), questions)
    for packed in (True, False):
        sequences = Sequences(settings(tmp_path, packing=packed), 32)
        statistics = sequences.statistics
        assert (statistics.examples, statistics.cut, statistics.dropped) == (4, 1, 2)
        # Of the cut one, all but the last letter and the end.
        assert statistics.loss_tokens == (exact + 1) + (exact + 1)
        assert len(sequences) == 2


def test_padding_counts_for_nothing(tmp_path: Path) -> None:
    write(tmp_path, *(answer(n) for n in (1, 5, 9)))
    layout = Layout(rank=0, world=1, micro_batch=3, accumulate=1, seq_len=64)
    padded = make_batches(settings(tmp_path, packing=False), layout, 256, seed=0)
    [batch] = padded.at(0)
    assert batch.positions is None
    assert batch.inputs.shape == (3, 64)
    assert batch.tokens == (1 + 5 + 9) + 3
    assert padded.statistics is not None
    assert padded.statistics.loss_share == pytest.approx(18 / (3 * 64))


def test_an_epoch_has_every_sequence_once_on_any_number_of_processes(tmp_path: Path) -> None:
    write(tmp_path, *(answer(n % 40 + 1) for n in range(120)))
    data = settings(tmp_path)
    found = {}
    for world in (1, 2, 4):
        rows = []
        for step in range(3):
            for rank in range(world):
                layout = Layout(rank, world, 4 // world, 1, 64)
                batches = make_batches(data, layout, 256, seed=3)
                assert isinstance(batches, ExampleBatches)
                batches.seek(0, 5)
                for batch in batches.at(step):
                    rows += [tuple(row) for row in batch.inputs.tolist()]
        found[world] = rows
    assert found[1] == found[2] == found[4]


def test_text_stays_text(tmp_path: Path) -> None:
    layout = Layout(rank=0, world=1, micro_batch=1, accumulate=1, seq_len=32)
    write(tmp_path, {"text": "a text of some length" * 3, "messages": ASKED})
    found = make_batches(settings(tmp_path), layout, 256, seed=0)
    assert isinstance(found, TokenBatches)
    assert found.statistics is None
    as_chat = make_batches(settings(tmp_path, format="chat"), layout, 256, seed=0)
    assert isinstance(as_chat, ExampleBatches)


@pytest.mark.parametrize(
    ("records", "more", "message"),
    [
        ([{"messages": ASKED}, {"body": "x"}], {}, "data.path: line 2 of .*chat.jsonl"),
        ([{"messages": [{"role": "user"}]}], {}, r"'messages\[0\]\.content' in line 1 of .* null"),
        ([{"messages": [{"content": "x"}]}], {}, r"'messages\[0\].*' in line 1 of .* no role"),
        ([{"messages": [{"role": ["x"], "content": "x"}]}], {}, "line 1 of .* no role"),
        (
            [{"messages": [{"from": "human", "value": [{"type": "text"}]}]}],
            {},
            r"'messages\[0\]\.value' in line 1 of .* a list",
        ),
        ([{"instruction": {"a": 1}, "output": "b"}], {}, "'instruction' in line 1 of .* object"),
        ([{"instruction": "a", "input": 0, "output": "b"}], {}, "'input' in line 1 .* a number"),
        ([{"messages": ["Hi"]}], {}, "line 1 of .* role and content"),
        ([{"messages": ASKED[:1]}], {}, "data.path: none of 1 examples has an answer"),
        ([], {"format": "chat"}, "data.path: .*has no examples"),
        ([{"messages": ASKED}], {"path": ("chat.jsonl", "more.txt")}, "chat.*more.txt"),
    ],
)
def test_what_cannot_be_read_says_why(
    tmp_path: Path, records: list[Any], more: dict[str, Any], message: str
) -> None:
    write(tmp_path, *records)
    (tmp_path / "more.txt").write_text("plain text")
    if "path" in more:
        more = {"path": tuple(str(tmp_path / name) for name in more["path"])}
    layout = Layout(rank=0, world=1, micro_batch=1, accumulate=1, seq_len=32)
    with pytest.raises(SpecError, match=message):
        make_batches(settings(tmp_path, **more), layout, 256, seed=0)


def test_a_template_that_refuses_names_the_line(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    folder = tokenizer_folder(tmp_path / "tokenizer", template)
    write(tmp_path, {"messages": ASKED})
    with pytest.raises(SpecError, match="line 1 of .*roles must alternate"):
        Sequences(settings(tmp_path, tokenizer=str(folder)), 8)


@pytest.mark.parametrize("line", [f'{{"messages": {"9" * 5_000}}}', "[" * 100_000])
def test_a_line_that_no_parser_takes_is_named(tmp_path: Path, line: str) -> None:
    file = write(tmp_path, {"messages": ASKED})
    file.write_text(file.read_text() + line)
    layout = Layout(rank=0, world=1, micro_batch=1, accumulate=1, seq_len=32)
    with pytest.raises(SpecError, match=r"data\.path: line 2 of .*chat.jsonl"):
        make_batches(settings(tmp_path), layout, 256, seed=0)
