"""Published runs of 2024 to 2026 as they are read."""

from __future__ import annotations

import pytest

from benchmarks.published_2026 import published, read_2026


def test_all_devices_together_have_the_tokens_of_a_step() -> None:
    """Those of a tensor or a context group share theirs."""
    read = [row for split in ("fit", "heldout") for row in read_2026((split,))[0]]
    stated = [(row, published(row.id)) for row in read if row.software.stack == "megatron"]
    assert any(row.strategy.mesh.tensor > 1 for row, _ in stated)
    assert any(row.strategy.mesh.context > 1 for row, _ in stated)
    for row, raw in stated:
        assert row.tokens * row.devices == int(raw["gbs"]) * int(raw["seq"]), row.id


@pytest.mark.parametrize(
    ("name", "joined"), [("mlp-033", 8), ("mlp-084", 72), ("mlp-088", 64), ("dgx-020", 8)]
)
def test_a_rack_is_one_node(name: str, joined: int) -> None:
    """NVLink joins 72 GPUs of GB200 and GB300; a run of 512 has eight racks of 64."""
    (row,) = [row for row in read_2026(("heldout",))[0] if row.id == name]
    assert row.hardware.devices_per_node == joined
