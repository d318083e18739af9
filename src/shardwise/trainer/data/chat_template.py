"""Convert conversations to token ids, and mark the tokens of answers.

A tokenizer's own chat template is used if its folder has one; otherwise a plain built-in template.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from shardwise.pytorch.quiet_libraries import quiet_imports, silence_transformers
from shardwise.spec.hub import stay_offline
from shardwise.spec.read_file import read_json
from shardwise.spec.record import SpecError
from shardwise.spec.train import DataSettings
from shardwise.trainer.data.chat import ANSWERS, Conversation, Message
from shardwise.trainer.data.tokenize import Tokenizer, load_tokenizer

TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json")


class Example(NamedTuple):
    """Token ids of one conversation; `answers` is true for the tokens of answers."""

    ids: npt.NDArray[np.int64]
    answers: npt.NDArray[np.bool_]


class ChatTemplate(Protocol):
    """Converts conversations to examples."""

    vocab: int

    def encode(self, conversations: Sequence[Conversation]) -> list[Example]: ...


def load_template(data: DataSettings) -> ChatTemplate:
    """The tokenizer's own chat template if its folder has one, else a PlainTemplate."""
    folder = Path(data.tokenizer)
    if data.tokenizer != "bytes" and _has_template(folder):
        return TokenizerTemplate(folder)
    return PlainTemplate(load_tokenizer(data))


class PlainTemplate:
    """A built-in template: for each message a line with the role and a colon, then the text.

    The text ends with a newline. An answer ends with the tokenizer's end token instead, if it has
    one, which is part of the answer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.vocab = tokenizer, tokenizer.vocab

    def encode(self, conversations: Sequence[Conversation]) -> list[Example]:
        return [self._example(conversation.messages) for conversation in conversations]

    def _example(self, messages: list[Message]) -> Example:
        end = self._tokenizer.end
        pieces: list[tuple[str, bool]] = []
        for message in messages:
            answers = message["role"] == ANSWERS
            closing = "" if answers and end is not None else "\n"
            pieces += [(f"{message['role']}:\n", False), (message["content"] + closing, answers)]
        ids, counts = [], []
        # Pieces are encoded one by one, so that no token crosses the boundary of an answer.
        encoded = self._tokenizer.encode([text for text, _ in pieces])
        for tokens, (_, answers) in zip(encoded, pieces, strict=True):
            closed = [*tokens.tolist(), *([end] if answers and end is not None else [])]
            ids += closed
            counts += [answers] * len(closed)
        return Example(np.asarray(ids, dtype=np.int64), np.asarray(counts, dtype=np.bool_))


class TokenizerTemplate:
    """The chat template of a tokenizer's folder, rendered by transformers."""

    def __init__(self, folder: Path) -> None:
        stay_offline()
        try:
            from transformers import AutoTokenizer
        except ModuleNotFoundError:
            raise SpecError(
                "data.tokenizer: its chat template needs transformers; install it with "
                "'pip install shardwise[hf]'"
            ) from None
        silence_transformers()
        try:
            with quiet_imports():
                self._library: Any = AutoTokenizer.from_pretrained(
                    folder, local_files_only=True, trust_remote_code=False
                )
        except Exception as error:
            if _settings(folder, "auto_map"):
                raise SpecError(
                    f"data.tokenizer: {folder} is read by code in that folder, which is never run; "
                    "give its tokenizer.json, or a tokenizer without code of its own"
                ) from None
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise SpecError(f"data.tokenizer: cannot read {folder}: {reason}") from None
        if not self._library.is_fast:
            raise SpecError(f"data.tokenizer: {folder} has no tokenizer.json, which chat needs")
        self.vocab: int = len(self._library)
        # Such templates mark answers themselves, in {% generation %} blocks.
        self._marks_answers = bool(
            re.search(r"{%-?\s*generation", str(self._library.chat_template))
        )

    def encode(self, conversations: Sequence[Conversation]) -> list[Example]:
        if self._marks_answers:
            return [self._marked(conversation) for conversation in conversations]
        texts, spans = [], []
        for conversation in conversations:
            text = self._render(conversation)
            texts.append(text)
            spans.append(list(self._answer_spans(conversation, text)))
        # The template has written the special tokens.
        encoded = self._library(texts, add_special_tokens=False, return_offsets_mapping=True)
        found = zip(encoded["input_ids"], encoded["offset_mapping"], spans, strict=True)
        return [_example(ids, offsets, answers) for ids, offsets, answers in found]

    def _marked(self, conversation: Conversation) -> Example:
        """The example whose answers are those that the template itself marks."""
        encoded = self._apply(
            conversation,
            conversation.messages,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids = np.asarray(encoded["input_ids"], dtype=np.int64)
        return Example(ids, np.asarray(encoded["assistant_masks"], dtype=np.bool_))

    def _answer_spans(self, conversation: Conversation, text: str) -> list[tuple[int, int]]:
        """(start, end) of each answer in `text`, in characters, including its closing tokens.

        An answer begins where the rendering of the messages before it, with the generation prompt,
        ends. Its closing tokens are those that follow its text if it is the last message.
        """
        spans = []
        for number, message in enumerate(conversation.messages):
            if message["role"] != ANSWERS:
                continue
            before = self._render(conversation, number, add_generation_prompt=True)
            last = self._render(conversation, number + 1)
            content = message["content"].strip()
            at, at_last = text.find(content, len(before)), last.rfind(content)
            if not text.startswith(before) or min(at, at_last) < 0:
                raise SpecError(
                    f"data.tokenizer: its chat template renders {conversation.where} differently "
                    "when messages follow, so that answers cannot be found; mark them with "
                    '{% generation %} in the template, or set data.loss_on = "all"'
                )
            closing = last[at_last + len(content) :].rstrip()
            end = at + len(content)
            spans.append((len(before), end + len(closing) * text.startswith(closing, end)))
        return spans

    def _render(self, conversation: Conversation, stop: int | None = None, **settings: Any) -> str:
        """The text of the messages before index `stop`, as the template renders it."""
        messages = conversation.messages[:stop]
        return str(self._apply(conversation, messages, tokenize=False, **settings))

    def _apply(self, conversation: Conversation, messages: list[Message], **settings: Any) -> Any:
        """Call apply_chat_template of transformers; an error becomes a SpecError."""
        try:
            return self._library.apply_chat_template(messages, **settings)
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise SpecError(
                f"data.tokenizer: its chat template cannot render {conversation.where}: {reason}"
            ) from None


def _example(
    ids: list[int], offsets: list[tuple[int, int]], answers: list[tuple[int, int]]
) -> Example:
    """An example of token ids and their (start, end) offsets in the text.

    `answers` are (start, end) in characters. A token belongs to an answer if any of its characters
    does.
    """
    starts, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
    counts = np.zeros(len(ids), dtype=np.bool_)
    for first, last in answers:
        counts |= (starts < last) & (ends > first) & (ends > starts)
    return Example(np.asarray(ids, dtype=np.int64), counts)


def _has_template(folder: Path) -> bool:
    return (folder / "chat_template.jinja").is_file() or bool(_settings(folder, "chat_template"))


def _settings(folder: Path, key: str) -> object:
    """The value of `key` in the folder's tokenizer_config.json; None if it is missing."""
    try:
        settings = read_json(folder / "tokenizer_config.json", "data.tokenizer", twice=True)
    except SpecError:
        return None
    return settings.get(key) if isinstance(settings, dict) else None
