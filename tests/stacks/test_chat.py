"""Chat data in exports: what a file does not carry over is listed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.stacks.write.exported import Exported
from shardwise.stacks.write.exports import STACKS, export_run
from tests.stacks.runs import large

TEXT_ONLY = ("python", "lightning", "torchtitan")
BY_SCRIPT = ("accelerate", "deepspeed", "trainer")
RECORDS = {"chat": {"prompt": "one", "completion": "two"}, "text": {"text": "one two"}}


def exported(folder: Path, stack: str, kind: str = "chat", **data: Any) -> Exported:
    file = folder / f"{kind}.jsonl"
    file.write_text(json.dumps(RECORDS[kind]) + "\n")
    return export_run(large(data={"path": str(file), **data}), stack)


def named(sentences: tuple[str, ...]) -> set[str]:
    """The settings of chat data that sentences are about."""
    names = ("format", "loss_on", "packing")
    return {name for name in names if any(s.startswith(f"data.{name} = ") for s in sentences)}


@pytest.mark.parametrize("stack", TEXT_ONLY)
def test_targets_of_text_list_every_setting(tmp_path: Path, stack: str) -> None:
    found = exported(tmp_path, stack)
    assert named(found.unsupported) == {"format", "loss_on", "packing"}
    padded = exported(tmp_path, stack, loss_on="all", packing=False)
    assert named(padded.unsupported) == {"format", "packing"}


@pytest.mark.parametrize("stack", BY_SCRIPT)
def test_what_the_users_script_has_to_do_is_listed(tmp_path: Path, stack: str) -> None:
    assert named(exported(tmp_path, stack).in_script) == {"format", "loss_on", "packing"}


@pytest.mark.parametrize(
    ("stack", "data", "differing"),
    [
        ("trl", {}, {"loss_on", "packing"}),
        ("trl", {"packing": False}, {"loss_on"}),
        ("axolotl", {}, set()),
        ("axolotl", {"loss_on": "all"}, {"loss_on"}),
        ("llama-factory", {}, set()),
        ("llama-factory", {"loss_on": "all"}, {"loss_on"}),
        ("slurm", {"loss_on": "all"}, set()),
        ("kubernetes", {"packing": False}, set()),
    ],
)
def test_stacks_of_chat_list_what_they_do_otherwise(
    tmp_path: Path, stack: str, data: dict[str, Any], differing: set[str]
) -> None:
    assert named(exported(tmp_path, stack, **data).unsupported) == differing


def test_a_trainer_with_adapters_reads_text(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    run = large(data={"path": str(file), "format": "chat"}, adapter="lora:16")
    found = export_run(run, "trainer")
    assert named(found.unsupported) == {"format", "loss_on", "packing"}
    assert not named(found.in_script)


@pytest.mark.parametrize("stack", STACKS)
def test_nothing_is_said_of_text(tmp_path: Path, stack: str) -> None:
    found = exported(tmp_path, stack, "text")
    assert not named((*found.unsupported, *found.in_script))
    asked = exported(tmp_path, stack, format="text")
    assert not named((*asked.unsupported, *asked.in_script))


def test_files_are_of_text_or_of_chat_as_the_data_are(tmp_path: Path) -> None:
    tables = {
        (stack, kind): yaml.safe_load(exported(tmp_path, stack, kind).text)
        for stack in ("trl", "axolotl", "llama-factory")
        for kind in RECORDS
    }
    assert tables["axolotl", "chat"]["datasets"][0]["type"] == "chat_template"
    assert tables["axolotl", "text"]["datasets"][0]["type"] == "completion"
    assert "packing_strategy" not in tables["trl", "chat"]
    assert tables["trl", "text"]["packing_strategy"] == "wrapped"
    assert tables["llama-factory", "chat"]["neat_packing"] is True
    assert "neat_packing" not in tables["llama-factory", "text"]


def test_a_script_does_not_read_the_tokens_of_chat_examples(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "chat-0123").mkdir(parents=True)
    (cache / "chat-0123" / "index.json").write_text("{}")
    assert "chat-0123" not in exported(tmp_path, "python", cache=str(cache)).text
    assert "chat-0123" in exported(tmp_path, "python", cache=str(cache), format="text").text
