"""The attention kernel of a run in the files of other stacks, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.predict.api import estimate_run
from shardwise.spec.question import describe_run
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from shardwise.stacks.read import axolotl, llama_factory
from shardwise.stacks.read.imports import import_file
from shardwise.stacks.write.differences import changed_fields
from shardwise.stacks.write.exports import export_run
from tests.stacks.runs import large

NAMES = {"sdpa": "sdpa", "flash-2": "flash_attention_2", "flash-3": "flash_attention_3",
         "flex": "flex_attention", "eager": "eager"}  # fmt: skip


@pytest.mark.parametrize("stack", ["trl", "axolotl"])
@pytest.mark.parametrize("attention", NAMES)
def test_a_kernel_comes_back(stack: str, attention: str, tmp_path: Path) -> None:
    run = large(strategy={"kind": "zero3", "attention": attention})
    written = export_run(run, stack)
    assert yaml.safe_load(written.text)["attn_implementation"] == NAMES[attention]
    assert "attention" not in changed_fields(run.strategy, written.applied)
    (tmp_path / written.name).write_text(written.text)
    assert import_file(tmp_path / written.name).strategy["attention"] == attention


@pytest.mark.parametrize(("attention", "name"), [("flash-2", "fa2"), ("eager", "disabled")])
def test_llama_factory_has_names_of_its_own(attention: str, name: str) -> None:
    run = large(strategy={"kind": "zero3", "attention": attention})
    table = yaml.safe_load(export_run(run, "llama-factory").text)
    assert table["flash_attn"] == name
    assert llama_factory.read(table).strategy["attention"] == attention
    assert "attention" not in llama_factory.read({**table, "flash_attn": "auto"}).strategy


@pytest.mark.parametrize("stack", ["accelerate", "trainer", "torchtitan", "llama-factory"])
def test_files_that_do_not_name_it_say_so(stack: str) -> None:
    run = large(strategy={"kind": "zero3", "attention": "flex"})
    written = export_run(run, stack)
    assert any("attention = flex" in sentence for sentence in written.unsupported)
    # Without a kernel of its own the run leaves it to the stack, as before.
    assert "attention" not in str(export_run(large(), stack).unsupported)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"flash_attention": True}, "flash-2"),
        ({"sdp_attention": True}, "sdpa"),
        ({"attn_implementation": "xformers"}, None),
        ({}, None),
    ],
)
def test_axolotls_switches(keys: dict[str, Any], expected: str | None) -> None:
    table = {"base_model": "m", "micro_batch_size": 1, "learning_rate": 1e-5, "bf16": True}
    found = axolotl.read({**table, **keys})
    assert found.strategy.get("attention") == expected
    lost = [one.key for one in found.outcomes if one.is_lost]
    assert lost == (["attn_implementation"] if "attn_implementation" in keys else [])


def step(attention: str | None, device: str = "H100-SXM") -> Any:
    run = describe_run("llama-3-8b", f"8x{device}", seq_len=4096)
    strategy = Strategy.read({"kind": "zero3", "attention": attention})
    return estimate_run(run._replace(strategy=strategy).resolved())


def test_times_are_those_of_the_kernel() -> None:
    seconds = {name: step(name).time.step_s for name in (None, *NAMES)}
    assert seconds["sdpa"] == seconds[None]
    assert seconds["flash-3"] < seconds["flash-2"] < seconds["eager"]


def test_eager_attention_keeps_its_scores() -> None:
    """In fp32 and in bf16, for each head, token and key of a layer; and a few more at the peak."""
    fused, eager = step("sdpa").known_memory, step("eager").known_memory
    scores = 32 * 32 * 4096 * 4096
    more = eager.peak_allocated_bytes - fused.peak_allocated_bytes
    assert scores * 6 < more < scores * 6 * 1.05


def test_a_kernel_that_nobody_measured_is_refused() -> None:
    with pytest.raises(SpecError, match=r"^strategy.attention: flash-3 was not measured on A100"):
        step("flash-3", "A100-80GB")
    with pytest.raises(SpecError, match="needs fused attention"):
        Strategy.read({"kind": "zero3", "context": 2, "attention": "eager"})
