"""torchtitan's TOML: each setting read, its defaults, and the way back through its Python form."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardwise
from shardwise.spec.record import SpecError
from shardwise.stacks.outcomes import Outcome
from shardwise.stacks.read import torchtitan_toml
from shardwise.stacks.read.imports import import_file
from shardwise.stacks.write.exports import export_run

EMPTY: dict[str, object] = {"training": {}}
FILE = """
[model]
name = "llama3"
flavor = "8B"
[optimizer]
lr = 3e-4
beta2 = 0.99
[lr_scheduler]
warmup_steps = 50
decay_type = "cosine"
min_lr_factor = 0.1
[training]
local_batch_size = 2
global_batch_size = 32
seq_len = 8192
steps = 1000
max_norm = 0.5
[parallelism]
data_parallel_shard_degree = 8
[activation_checkpoint]
mode = "full"
[compile]
enable = true
components = ["model"]
[debug]
seed = 7
"""


def read(**sections: Any) -> Any:
    return torchtitan_toml.read({"training": {}, **sections})


def test_every_setting_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(FILE)
    found = import_file(tmp_path / "a.toml")
    expected = {"steps": 1000, "learning_rate": 3e-4, "beta1": 0.9, "beta2": 0.99,
                "weight_decay": 0.1, "epsilon": 1e-8, "clip_norm": 0.5, "schedule": "cosine",
                "final_learning_rate": 0.1, "warmup_steps": 50, "seed": 7}  # fmt: skip
    assert found.train == expected
    assert found.model == "llama-3.1-8b"
    assert found.job == {"seq_len": 8192, "optimizer": "adamw"}
    strategy = {"kind": "zero3", "shard": 8, "replicate": 1, "micro_batch": 2, "accumulate": 2,
                "recompute": "full", "compile": True, "param_dtype": "bf16",
                "master_dtype": "fp32"}  # fmt: skip
    assert {name: found.strategy[name] for name in strategy} == strategy
    assert not found.unsupported


@pytest.mark.parametrize(
    ("section", "recompute"),
    [({}, 0.5), ({"mode": "none"}, "none"), ({"mode": "full"}, "full"),
     ({"selective_ac_option": "op"}, "selective"), ({"selective_ac_option": "1"}, "full"),
     ({"mode": "selective", "selective_ac_option": "4"}, 0.25)],
)  # fmt: skip
def test_activation_checkpointing(section: dict[str, Any], recompute: object) -> None:
    assert read(activation_checkpoint=section).strategy["recompute"] == recompute


def test_low_bits_come_from_converters() -> None:
    gathers = {"linear": {"float8": {"enable_fsdp_float8_all_gather": True}}}
    assert "linear_dtype" not in read(quantize=gathers).strategy
    on = read(model={"converters": ["quantize.linear.float8"]}, quantize=gathers).strategy
    assert (on["linear_dtype"], on["low_bit_gather"]) == ("fp8", True)


def test_what_is_unknown_or_without_counterpart_is_listed() -> None:
    found = read(
        parallelism={"pipeline_parallel_degree": 2},
        optimizer={"name": "Muon"},
        lr_scheduler={"decay_ratio": 0.2},
        training={"sequence_length": 1},
        model={"flavor": "debugmodel"},
    )
    lost = {one.key for one in found.outcomes if one.is_lost}
    assert lost == {"pipeline_parallel_degree", "optimizer.name", "decay_ratio",
                    "training.sequence_length", "flavor"}  # fmt: skip


def test_other_toml_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('model = "gpt2"\n[strategy]\nkind = "zero3"\n')
    with pytest.raises(SpecError, match="not torchtitan's"):
        import_file(tmp_path / "run.toml")


def test_the_way_back_changes_nothing_but_what_is_listed(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(FILE)
    first = shardwise.import_(tmp_path / "a.toml", cluster="8xH100-SXM").run
    assert first is not None
    written = export_run(first.resolved(), "torchtitan")
    (tmp_path / written.name).write_text(written.text)
    again = shardwise.import_(tmp_path / written.name, cluster="8xH100-SXM")
    assert again.imported.model == "llama-3.1-8b"
    assert again.run is not None
    assert again.run.resolved().strategy == first.resolved().strategy
    assert again.run.job == first.job
    assert again.run.train == first.train


# The value that each default sets, by torchtitan's section and key.
def defaults_here() -> dict[tuple[str, str], Any]:
    found = torchtitan_toml.read(EMPTY)
    names: dict[str, dict[str, Any]]
    names = {"training": {"seq_len": found.job["seq_len"], "steps": found.train["steps"],
                          "local_batch_size": found.strategy["micro_batch"],
                          "max_norm": found.train["clip_norm"]},
             "lr_scheduler": {"warmup_steps": found.train["warmup_steps"],
                              "decay_type": found.train["schedule"],
                              "min_lr_factor": found.train["final_learning_rate"]},
             "optimizer": {"lr": found.train["learning_rate"], "eps": found.train["epsilon"],
                           "beta1": found.train["beta1"], "beta2": found.train["beta2"],
                           "weight_decay": found.train["weight_decay"]},
             "activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"},
             "compile": {"enable": found.strategy["compile"]}}  # fmt: skip
    return {(part, key): value for part, keys in names.items() for key, value in keys.items()}


@pytest.mark.nightly
def test_defaults_and_keys_are_those_of_the_release(tmp_path: Path) -> None:
    """pip fetches the release alone; its configuration classes need no other package."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path)]
    done = subprocess.run(
        [*pip, f"torchtitan=={torchtitan_toml.VERSION}"], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"pip cannot fetch it: {done.stderr.strip()[-200:]}")
    path = tmp_path / "torchtitan" / "config" / "job_config.py"
    spec = importlib.util.spec_from_file_location("job_config_of_torchtitan", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    config = module.JobConfig()
    for (section, key), value in defaults_here().items():
        assert getattr(getattr(config, section), key) == value, (section, key)
    for section, keys in torchtitan_toml.KNOWN.items():
        theirs = {field.name for field in dataclasses.fields(getattr(config, section))}
        assert set(keys) == theirs, section
    sections = {field.name for field in dataclasses.fields(config)}
    assert not [
        one for one in torchtitan_toml.read({name: {} for name in sections}).outcomes
        if one.kind == "unknown"
    ]  # fmt: skip


def test_defaults_are_named() -> None:
    named = {one.key for one in torchtitan_toml.read(EMPTY).outcomes if _is_default(one)}
    assert {"seq_len", "steps", "decay_type", "optimizer.name"} <= named


def _is_default(one: Outcome) -> bool:
    return one.kind == "default"
