"""What of chat data (`format`, `loss_on`, `packing` of `[data]`) a file does not carry over."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.spec.chat import holds_chat
from shardwise.spec.run import RunSpec


def chat_differences(run: RunSpec, instead: Mapping[tuple[str, str], str]) -> list[str]:
    """Sentences for a stack that trains on chat examples.

    `instead` is what it does where a setting has a value that its file does not carry over.
    """
    data = run.data
    if data is None or not holds_chat(data):
        return []
    values = {"loss_on": data.loss_on, "packing": str(data.packing).lower()}
    return [
        f"data.{name} = {value}: {instead[name, value]}."
        for name, value in values.items()
        if (name, value) in instead
    ]


def stream_differences(run: RunSpec, who: str) -> list[str]:
    """Sentences for a target that trains on one stream of text tokens."""
    data = run.data
    if data is None or not holds_chat(data):
        return []
    said = [f"data.format = chat: {who} reads text; it has no chat template."]
    if data.loss_on == "answers":
        said.append(f"data.loss_on = answers: {who} computes the loss on every token.")
    if data.packing:
        said.append("data.packing = true: examples of one sequence attend to each other.")
    else:
        said.append("data.packing = false: sequences are cut from one stream, not padded.")
    return said


def left_to_script(run: RunSpec) -> list[str]:
    """Sentences for a target whose data the user's script reads."""
    data = run.data
    if data is None or not holds_chat(data):
        return []
    packing = (
        "pack examples so that none attends to another" if data.packing else "pad each to seq_len"
    )
    counted = "answers only" if data.loss_on == "answers" else "all tokens"
    return [
        "data.format = chat: apply the chat template in your script.",
        f"data.loss_on = {data.loss_on}: compute the loss on {counted} in your script.",
        f"data.packing = {str(data.packing).lower()}: {packing} in your script.",
    ]
