"""Chat and instruction records of jsonl files, as lists of messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.spec.chat import read_json, shape_of, starts_with_chat
from shardwise.spec.record import SpecError
from shardwise.spec.train import DataSettings
from shardwise.trainer.data.documents import read_records, require_text

# A role and its text: {"role": "user", "content": "…"}, as chat templates read them.
Message = dict[str, str]

ANSWERS = "assistant"
_ROLES = {"human": "user", "gpt": ANSWERS, "bot": ANSWERS, "model": ANSWERS}


class Conversation(NamedTuple):
    """The messages of one record.

    `where` names the record in error messages, such as "line 3 of chat.jsonl".
    """

    messages: list[Message]
    where: str


def is_chat(data: DataSettings, files: list[Path]) -> bool:
    """Whether to train on the files as chat examples, by data.format and their content.

    Raises SpecError if only some of them hold chat examples.
    """
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
    """Yield the conversations of a jsonl file, one per line."""
    try:
        for line, where in read_records(file):
            yield Conversation(messages_of(read_json(line), where), where)
    except (UnicodeDecodeError, OSError) as error:
        raise SpecError(f"data.path: cannot read {file}: {error}") from None


def messages_of(record: Any, where: str) -> list[Message]:
    """The messages of a record in one of these shapes; raises SpecError for other records.

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
        asked = [require_text(record["instruction"], "instruction", where)]
        # Published files leave the input out, empty or null where there is none.
        if record.get("input") is not None:
            asked.append(require_text(record["input"], "input", where))
        parts = [("user", "instruction", "\n\n".join(filter(None, asked)))]
        parts.append((ANSWERS, "output", record["output"]))
    elif shape[0] == "prompt":
        parts = [("user", "prompt", record["prompt"])]
        parts.append((ANSWERS, "completion", record["completion"]))
    else:
        parts = [("", shape[0], record[shape[0]])]
    messages = [
        message
        for role, field, content in parts
        for message in (
            _listed(content, field, where)
            if isinstance(content, list)
            else [_message(role, content, field, where)]
        )
    ]
    if not messages:
        raise SpecError(f"data.path: {where} has no message; remove this record")
    return messages


def _listed(messages: list[Any], field: str, where: str) -> Iterator[Message]:
    """Yield the messages of a list whose items have role and content, or from and value."""
    for number, message in enumerate(messages):
        at = f"{field}[{number}]"
        if not isinstance(message, dict):
            raise SpecError(
                f"data.path: {at} in {where} is no object with role and content; correct this "
                "record"
            )
        role, content = (
            next((key for key in keys if key in message), keys[0])
            for keys in (("role", "from"), ("content", "value"))
        )
        yield _message(message.get(role), message.get(content), f"{at}.{content}", where)


def _message(role: Any, content: Any, field: str, where: str) -> Message:
    """A message with the usual name of its role; raises SpecError unless both parts are text."""
    if not isinstance(role, str) or not role:
        raise SpecError(f"data.path: {field!r} in {where} has no role; correct this record")
    return {"role": _ROLES.get(role, role), "content": require_text(content, field, where)}
