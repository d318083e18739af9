"""The section [adapter] and its shorthands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.spec.adapter import Adapter, read_adapter
from shardwise.spec.model import ModelSpec
from shardwise.spec.record import SpecError
from shardwise.spec.run import read_run, write_run
from tests.spec.test_huggingface import LLAMA


def test_shorthands() -> None:
    assert read_adapter("lora:16") == Adapter(rank=16)
    assert read_adapter("QLoRA:8") == Adapter(rank=8, base="nf4")
    assert read_adapter("dora:4") == Adapter(rank=4, dora=True)
    assert read_adapter("lora:16:q_proj,v_proj").targets == ("q_proj", "v_proj")


def test_scaling() -> None:
    assert Adapter(rank=16).scaling == 2.0
    assert Adapter(rank=16, alpha=8).scaling == 0.5
    assert Adapter(rank=16, alpha=8, rslora=True).scaling == 2.0


def test_targets_are_the_last_parts_of_names() -> None:
    every, some = Adapter(rank=1), Adapter(rank=1, targets=("q_proj",))
    assert every.adapts("model.layers.0.mlp.down_proj")
    assert not every.adapts("lm_head")
    assert some.adapts("model.layers.0.self_attn.q_proj")
    assert not some.adapts("model.layers.0.self_attn.aq_proj")
    assert not Adapter(train=("norm",)).adapts("model.layers.0.self_attn.q_proj")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("lora", "lora:16"),
        ("lora:0", "at least 1"),
        ({}, "nothing is trained"),
        ({"train": ["norm"], "dora": True}, "dora belongs to LoRA"),
        ({"rank": 8, "targets": ["all-linear", "q_proj"]}, "all-linear stands alone"),
        ({"rank": 8, "base": "int3"}, "base"),
        (16, "a table or a text"),
    ],
)
def test_what_is_wrong_is_said(given: object, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        read_adapter(given)


@pytest.mark.parametrize("adapter", ['"lora:16"', '{rank = 8, train = ["norm"], base = "nf4"}'])
def test_a_run_is_written_and_read_back(tmp_path: Path, adapter: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'model = "llama-3-8b"\ncluster = "8xH100-SXM"\nadapter = {adapter}\n')
    run = read_run(path)
    assert run.adapter is not None
    path.write_text(write_run(run))
    assert read_run(path) == run
    assert "[adapter]" in path.read_text()


def test_adapters_start_from_the_weights_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    text = f'model = "{tmp_path}"\ncluster = "1xA100-80GB"\nstrategy = "single"\n'
    file = tmp_path / "run.toml"

    def starts(adapter: str) -> bool:
        file.write_text(text + adapter)
        model = read_run(file).from_weights().model
        assert isinstance(model, ModelSpec)
        return model.pretrained

    assert not starts('adapter = "lora:8"')
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert starts('adapter = "lora:8"')
    assert not starts("")
