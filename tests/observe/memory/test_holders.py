"""Whose memory it is: by the first frame that is not torch's, and by kind."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.observe.memory.allocator import Frame
from shardwise.observe.memory.frames import category_of, owner_of
from tests.observe.memory.build import (
    BACKWARD,
    FORWARD,
    GATHER,
    MIB,
    MODULE,
    OPTIMIZER,
    PARAMETERS,
    PLAIN,
    block,
    event,
    frame,
    read_one,
    segment,
    snapshot,
)

DISTRIBUTED = "/env/lib/python3.12/site-packages/torch/distributed/"


def stack(frames: list[dict[str, Any]]) -> list[Frame]:
    return [Frame(one["filename"], one["line"], one["name"]) for one in frames]


@pytest.mark.parametrize(
    ("frames", "category", "place"),
    [
        (FORWARD, "forward", ("/home/me/model.py", 21, "forward")),
        (BACKWARD, "backward", (None, None, "MulBackward0 (autograd)")),
        (OPTIMIZER, "optimizer", ("/home/me/train.py", 12, "main")),
        (PARAMETERS, "parameters", ("/home/me/train.py", 4, "main")),
        (GATHER, "collectives", ("/home/me/model.py", 21, "forward")),
        (PLAIN, "unknown", ("/home/me/train.py", 3, "main")),
        ([frame("??", 0, "malloc")], "unknown", (None, None, "no Python frame")),
        ([frame(MODULE, 3, "x")], "forward", (MODULE, 3, "x")),
        # A module that FSDP wraps computes; it does not gather.
        (
            [*FORWARD[:3], frame(DISTRIBUTED + "fsdp/_fully_shard/_fsdp_state.py", 1,
                                 "fsdp_hook_wrapper"), *FORWARD[3:]],
            "forward",
            ("/home/me/model.py", 21, "forward"),
        ),
        # The states of an optimizer over DTensors are no collective, though DTensor makes them.
        ([frame(DISTRIBUTED + "tensor/_dispatch.py", 150, "dispatch"), *OPTIMIZER], "optimizer",
         ("/home/me/train.py", 12, "main")),
        ([frame(DISTRIBUTED + "tensor/_redistribute.py", 9, "redistribute_local_tensor"), *PLAIN],
         "collectives", ("/home/me/train.py", 3, "main")),
        ([frame(DISTRIBUTED + "fsdp/_fully_shard/_fsdp_init.py", 9, "_move_states_to_device"),
          *PLAIN], "parameters", ("/home/me/train.py", 3, "main")),
        # Recomputed in the backward, where Python is all that was recorded.
        ([*FORWARD[:4], frame("/env/site-packages/torch/utils/checkpoint.py", 9, "unpack_hook")],
         "backward", ("/home/me/model.py", 21, "forward")),
        ([frame("??", 0, "c10d::Reducer::initialize_buckets"), *PLAIN], "collectives",
         ("/home/me/train.py", 3, "main")),
        ([frame("/home/me/torch/train.py", 5, "go")], "unknown",
         ("/home/me/torch/train.py", 5, "go")),
    ],
)  # fmt: skip
def test_a_stack_tells_kind_and_place(
    frames: list[dict[str, Any]], category: str, place: tuple[str | None, int | None, str]
) -> None:
    assert category_of(stack(frames)) == category
    assert owner_of(stack(frames))[:3] == place


def test_everything_at_the_peak_is_grouped_and_sums() -> None:
    """Parameters 10, activations 6 + 6 at one line, states 20, gathered 3, backward 4 + 5."""
    sizes = [10, 6, 6, 20, 3, 4, 5]
    stacks = [PARAMETERS, FORWARD, FORWARD, OPTIMIZER, GATHER, BACKWARD, BACKWARD]
    places = [0x1000_0000 * (n + 1) for n in range(len(sizes))]
    made = [event("alloc", place, size * MIB, frames)
            for place, size, frames in zip(places, sizes, stacks, strict=True)]  # fmt: skip
    # Of the backward's two, one outlives it into the next forward: a gradient.
    after = [event("free_requested", places[5], 4 * MIB, BACKWARD),
             event("alloc", 0x9000_0000, 1 * MIB, FORWARD)]  # fmt: skip
    kept = [block(place, size * MIB, frames=frames)
            for n, (place, size, frames) in enumerate(zip(places, sizes, stacks, strict=True))
            if n != 5]  # fmt: skip
    ends = segment([*kept, block(0x9000_0000, 1 * MIB, frames=FORWARD),
                    block(0xA000_0000, 50 * MIB, "inactive")])  # fmt: skip
    memory = read_one(snapshot([ends], made + after))
    assert memory.peak.allocated_bytes == sum(sizes) * MIB
    assert memory.peak.event == 7
    assert {share.category: share.bytes // MIB for share in memory.categories} == {
        "optimizer": 20, "forward": 12, "parameters": 10, "gradients": 5, "backward": 4,
        "collectives": 3,
    }  # fmt: skip
    assert [(h.place, h.category, h.bytes // MIB, h.allocations) for h in memory.holders] == [
        ("train.py:12 main", "optimizer", 20, 1),
        ("model.py:21 forward", "forward", 12, 2),
        ("train.py:4 main", "parameters", 10, 1),
        ("MulBackward0 (autograd)", "gradients", 5, 1),
        ("MulBackward0 (autograd)", "backward", 4, 1),
        ("model.py:21 forward", "collectives", 3, 1),
    ]
    assert memory.transient_bytes == memory.loss_bytes == 0


def test_a_step_of_the_optimizer_that_frees_again_is_transient() -> None:
    memory = read_one(
        snapshot([segment([block(0x1000, 8 * MIB, frames=OPTIMIZER), block(0x2000, 2 * MIB,
                           "inactive")])],
                 [event("alloc", 0x1000, 8 * MIB, OPTIMIZER),
                  event("alloc", 0x2000, 2 * MIB, OPTIMIZER),
                  event("free_requested", 0x2000, 2 * MIB, OPTIMIZER)])
    )  # fmt: skip
    assert memory.transient_bytes == 2 * MIB


def test_a_loss_over_a_vocabulary_is_seen_in_forward_and_backward() -> None:
    functional = "/env/lib/python3.12/site-packages/torch/nn/functional.py"
    loss = [frame(functional, 3504, "cross_entropy"), frame("/home/me/train.py", 10, "main")]
    behind = [frame("??", 0, "torch::autograd::generated::LogSoftmaxBackward0::apply()")]
    memory = read_one(
        snapshot([segment([block(0x1000, 7), block(0x2000, 5), block(0x3000, 3)])],
                 [event("alloc", 0x1000, 7, PLAIN), event("alloc", 0x2000, 5, loss),
                  event("alloc", 0x3000, 3, behind)])
    )  # fmt: skip
    assert (memory.loss_bytes, memory.loss_place) == (8, "train.py:10 main")


def test_no_stacks_is_said_and_not_guessed() -> None:
    memory = read_one(
        snapshot([segment([block(0x1000, 7, frames=[])])], [event("alloc", 0x1000, 7, [])])
    )
    assert (memory.loss_bytes, memory.transient_bytes) == (None, None)
    assert memory.holders[0].place == "no stack recorded"
