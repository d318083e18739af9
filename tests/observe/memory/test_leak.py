"""Leaks that were planted are found at their line; where there is none, none is."""

from __future__ import annotations

import pytest

from tests.observe.memory.build import (
    FORWARD,
    KEPT,
    MIB,
    PLAIN,
    STEP_US,
    block,
    event,
    read_one,
    segment,
    snapshot,
    training,
)


@pytest.mark.parametrize(
    ("evidence", "said"),
    [
        ({"names": True}, "annotations"),
        ({"notes": True}, "metadata"),
        ({"optimizer": True}, "optimizer"),
        ({}, "recurrence"),
    ],
)
def test_a_planted_leak_is_found_at_its_line(evidence: dict[str, bool], said: str) -> None:
    memory = read_one(training(8, leak=3000, **evidence))
    assert memory.leak.found is True
    assert memory.leak.bytes_per_step == 3000
    assert memory.leak.place == "train.py:33 log"
    assert memory.leak.file == "/home/me/train.py"
    assert memory.leak.steps_by == said
    none = read_one(training(8, **evidence)).leak
    assert none.found is False
    assert (none.reason, none.steps_by) == ("no_growth", said)


def test_what_is_made_once_is_no_leak() -> None:
    assert read_one(training(8, leak=3000, names=True, first_only=True)).leak.found is False


def test_too_few_steps_are_not_judged() -> None:
    leak = read_one(training(3, leak=3000, names=True)).leak
    assert leak.found is None
    assert leak.reason == "steps_unknown"
    assert leak.bytes_per_step is None


def test_layers_of_one_forward_are_no_steps() -> None:
    """Twelve equal layers that keep their activations recur evenly, and the memory ends there."""
    events, blocks = [], []
    for layer in range(12):
        for part in range(4):
            address = 0x1_0000_0000 + (layer * 4 + part) * MIB
            events.append(event("alloc", address, 1000 + part, FORWARD))
            blocks.append(block(address, 1000 + part, frames=FORWARD))
        events.append(event("alloc", 0x1000, 500, FORWARD))
        events.append(event("free_requested", 0x1000, 500, FORWARD))
    memory = read_one(snapshot([segment(blocks)], events))
    assert memory.leak.found is None


def test_growth_that_differs_from_step_to_step_is_no_steady_leak() -> None:
    """One place that keeps 1, 100, 1, 100 … bytes: a cache that fills, not a leak per step."""
    data = training(8, names=True)
    events = data["device_traces"][0]
    grown, blocks = [], data["segments"][0]["blocks"]
    for step in range(8):
        own = [one for one in events if step * STEP_US <= one["time_us"] < (step + 1) * STEP_US]
        size = 100 if step % 2 else 1
        address = 0x1_0000_0000 + step * MIB
        grown += [*own, event("alloc", address, size, PLAIN, step * STEP_US + 8)]
        blocks.append(block(address, size))
    data["segments"] = [segment(blocks)]
    assert read_one({**data, "device_traces": [grown]}).leak.found is False


def test_what_replaces_something_as_large_is_no_leak() -> None:
    """Each step makes 3000 bytes that stay and frees 3000 that were there before."""
    data = training(8, leak=3000, names=True)
    events = data["device_traces"][0]
    for step in range(8):
        event_of_step = event("free_requested", 0x9_0000_0000 + step, 3000, PLAIN,
                              step * STEP_US + 3)  # fmt: skip
        at = next(n for n, one in enumerate(events) if one["time_us"] == step * STEP_US + 4)
        events.insert(at, event_of_step)
    assert read_one(data).leak.found is False


def test_what_the_next_step_would_free_does_not_hide_a_leak() -> None:
    """The line that leaks also holds 10,000 bytes from each step to the next."""
    data = training(8, leak=3000, optimizer=True)
    events, blocks = [], data["segments"][0]["blocks"]
    for one in data["device_traces"][0]:
        events.append(one)
        if one["frames"] is KEPT:
            step = one["time_us"] // STEP_US
            if step:
                events.append(event("free_requested", 0x5000 + step - 1, 10_000, PLAIN))
            events.append(event("alloc", 0x5000 + step, 10_000, KEPT))
    data["segments"] = [segment([*blocks, block(0x5000 + 7, 10_000, frames=KEPT)])]
    leak = read_one({**data, "device_traces": [events]}).leak
    assert leak.found is True
    assert (leak.bytes_per_step, leak.place) == (3000, "train.py:33 log")
