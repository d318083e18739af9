"""Chat and instruction records of jsonl files, as lists of messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.spec.chat import read_json, shape_of, starts_with_chat
from shardwise.spec.record import SpecError
from shardwise.spec.train import DataSettings

# A role and its text: {"role": "user", "content": "…"}, as chat templates read them.
Message = dict[str, str]

ANSWERS = "assistant"
_ROLES = {"human": "user", "gpt": ANSWERS, "bot": ANSWERS, "model": ANSWERS}


class Conversation(NamedTuple):
    """The messages of one record, and where it is, for errors."""

    messages: list[Message]
    where: str


def is_chat(data: DataSettings, files: list[Path]) -> bool:
    """Whether the files hold chat examples; raises SpecError if only some of them do."""
    if data.format == "text":
        return False
    chat = [file for file in files if starts_with_chat(file, data.text_key)]
    if data.format == "auto" and not chat:
        return False
    other = next((file for file in files if file.suffix != ".jsonl" or file not in chat), None)
    if data.format == "auto" and other is not None:
        raise SpecError(
            f"data.path: {chat[0]} holds chat examples and {other} does not; train on one kind, "
            "or set data.format"
        )
    if other is not None and other.suffix != ".jsonl":
        raise SpecError(f"data.path: {other} is not .jsonl, which chat examples need")
    return True


def read_conversations(file: Path) -> Iterator[Conversation]:
    """The conversations of a jsonl file, one per line."""
    try:
        with file.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    where = f"line {number} of {file}"
                    yield Conversation(messages_of(read_json(line), where), where)
    except (UnicodeDecodeError, OSError) as error:
        raise SpecError(f"data.path: cannot read {file}: {error}") from None


def messages_of(record: Any, where: str) -> list[Message]:
    """The messages of a record in one of these shapes.

    - `messages`: role and content; `conversations`: from and value.
    - `prompt` and `completion`: texts, or lists of messages.
    - `instruction` and `output`, with an optional `input`.
    """
    shape = shape_of(record)
    if shape is None:
        raise SpecError(
            f"data.path: {where} has no messages, conversations, prompt and completion, or "
            "instruction and output; chat examples need one of these"
        )
    if shape[0] == "instruction":
        asked = [record["instruction"], record.get("input")]
        prompt = "\n\n".join(str(text) for text in asked if text)
        parts = [("user", prompt), (ANSWERS, record["output"])]
    elif shape[0] == "prompt":
        parts = [("user", record["prompt"]), (ANSWERS, record["completion"])]
    else:
        parts = [("", record[shape[0]])]
    messages = [
        message
        for role, content in parts
        for message in (
            _listed(content, where) if isinstance(content, list) else [_message(role, content)]
        )
    ]
    if not messages or not all(isinstance(m["content"], str) and m["role"] for m in messages):
        raise SpecError(
            f"data.path: {where} has a message without a role or without text; each needs both"
        )
    return messages


def _listed(messages: list[Any], where: str) -> list[Message]:
    if not all(isinstance(message, dict) for message in messages):
        raise SpecError(f"data.path: {where} has a message that is no object with role and content")
    return [
        _message(m.get("role", m.get("from")), m.get("content", m.get("value"))) for m in messages
    ]


def _message(role: Any, content: Any) -> Message:
    return {"role": _ROLES.get(role, role), "content": content}
