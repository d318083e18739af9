"""Settings of chat data (`format`, `loss_on`, `packing` of `[data]`) that an export changes."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.spec.chat import holds_chat
from shardwise.spec.run import RunSpec
from shardwise.stacks.outcomes import Difference


def chat_differences(run: RunSpec, instead: Mapping[tuple[str, str], str]) -> list[Difference]:
    """Differences of a stack that trains on chat examples; empty for other data.

    `instead` says what the stack does, by (setting, value) of those that its file cannot express.
    """
    data = run.data
    if data is None or not holds_chat(data):
        return []
    values = {"loss_on": data.loss_on, "packing": str(data.packing).lower()}
    return [
        Difference(instead[name, value], {f"data.{name}": value})
        for name, value in values.items()
        if (name, value) in instead
    ]


def stream_differences(run: RunSpec, who: str) -> list[Difference]:
    """Differences of a stack that trains on one stream of text; empty for other data."""
    data = run.data
    if data is None or not holds_chat(data):
        return []
    without = f"{who} reads text; it has no chat template"
    differences = [Difference(without, {"data.format": "chat"})]
    if data.loss_on == "answers":
        every = f"{who} computes the loss on every token"
        differences.append(Difference(every, {"data.loss_on": "answers"}))
    joined = "examples of one sequence attend to each other"
    cut = "sequences are cut from one stream, not padded"
    packing = Difference(joined if data.packing else cut, {"data.packing": data.packing})
    return [*differences, packing]


def left_to_script(run: RunSpec) -> list[Difference]:
    """What the user's script must do for chat data; empty for other data."""
    data = run.data
    if data is None or not holds_chat(data):
        return []
    packing = (
        "pack examples so that none attends to another" if data.packing else "pad each to seq_len"
    )
    counted = "answers only" if data.loss_on == "answers" else "all tokens"
    return [
        Difference("apply the chat template in your script", {"data.format": "chat"}),
        Difference(f"compute the loss on {counted} in your script", {"data.loss_on": data.loss_on}),
        Difference(f"{packing} in your script", {"data.packing": data.packing}),
    ]
