"""Files for fine-tuning stacks, read by the packages themselves, and the packages' own examples.

axolotl and LLaMA-Factory need much that is not installed here; their settings are read from their
source packages, which pip downloads without anything else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shardwise.spec.record import SpecError
from shardwise.stacks.read.imports import import_file
from shardwise.stacks.write.exports import export_run
from tests.stacks.test_fine_tuning import ADAPTERS, STRATEGIES, TRAIN, a_run

yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.nightly

# Every adapter once, and every strategy once.
CASES = [("zero3", adapter) for adapter in ADAPTERS]
CASES += [(strategy, "lora") for strategy in STRATEGIES if strategy != "zero3"]


def run_pip(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"pip cannot fetch it: {done.stderr.strip()[-200:]}")


def source_of(package: str, folder: Path) -> Path:
    """The unpacked source package."""
    run_pip("download", "--no-deps", "--no-binary", package, package, "-d", str(folder))
    archive = next(folder.glob("*.tar.gz"))
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def axolotl_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source_of("axolotl", tmp_path_factory.mktemp("axolotl"))


@pytest.fixture(scope="module")
def llama_factory_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source_of("llamafactory", tmp_path_factory.mktemp("llamafactory"))


def read_by(code: str, folder: Path, *paths: Path) -> Any:
    """The JSON that a program of the package's own prints."""
    more = {"DISABLE_VERSION_CHECK": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    path = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, **more, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if "ModuleNotFoundError" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def on_cpu(table: dict[str, Any]) -> dict[str, Any]:
    """Without GPUs transformers refuses bf16 and all that needs accelerators; the rest stays."""
    changed = {"use_cpu": True, "bf16": False, "report_to": "none", "output_dir": "out"}
    return {key: value for key, value in (table | changed).items() if key != "deepspeed"}


@pytest.mark.parametrize(("strategy", "adapter"), CASES)
def test_trl_reads_every_file(strategy: str, adapter: str, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    run = a_run(ADAPTERS[adapter], STRATEGIES[strategy])
    table = on_cpu(yaml.safe_load(export_run(run, "trl").text))
    table.pop("env", None)
    file = tmp_path / "trl.yaml"
    file.write_text(yaml.safe_dump(table))
    kinds = (trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig, trl.DatasetMixtureConfig)
    # It fails where a key is unknown to all of them.
    _, args, model, _ = trl.TrlParser(kinds).parse_args_and_config(["--config", str(file)])
    assert args.per_device_train_batch_size == run.strategy.micro_batch
    assert args.max_length == run.job.seq_len
    assert args.max_steps == TRAIN["steps"]
    assert bool(args.fsdp) is (run.strategy.sharded and run.strategy.kind != "zero1")
    lora = trl.get_peft_config(model)
    assert (lora is None) == (run.adapter is None or run.adapter.rank is None)
    if lora is not None:
        assert run.adapter is not None
        assert (lora.r, lora.lora_alpha) == (run.adapter.rank, round(run.adapter.scale))
        assert (lora.use_dora, lora.use_rslora) == (run.adapter.dora, run.adapter.rslora)
        bits = trl.get_quantization_config(model)
        assert (bits is not None) == run.adapter.quantised


AXOLOTL = """
import json, yaml
from axolotl.utils.schemas.config import AxolotlInputConfig
read = []
for name in sorted(__import__("glob").glob("*.yaml")):
    given = yaml.safe_load(open(name))
    config = AxolotlInputConfig(**given)
    unknown = set(given) - set(AxolotlInputConfig.model_fields)
    read.append([name, config.micro_batch_size, config.lora_r, config.adapter, sorted(unknown),
                 config.optimizer, config.peft_use_dora])
print(json.dumps(read))
"""


def test_axolotl_reads_every_file(axolotl_source: Path, tmp_path: Path) -> None:
    runs = {}
    for strategy, adapter in CASES:
        run = a_run(ADAPTERS[adapter], STRATEGIES[strategy])
        name = f"{strategy}-{adapter}.yaml".replace(" ", "-")
        (tmp_path / name).write_text(export_run(run, "axolotl").text)
        runs[name] = run
    read = read_by(AXOLOTL, tmp_path, axolotl_source / "src")
    assert {row[0] for row in read} == set(runs)
    for name, micro_batch, rank, _, unknown, _, dora in read:
        run = runs[name]
        assert unknown == []
        assert micro_batch == run.strategy.micro_batch
        assert rank == (run.adapter.rank if run.adapter else None)
        assert bool(dora) is bool(run.adapter and run.adapter.dora)


LLAMA_FACTORY = """
import json, yaml
from transformers import HfArgumentParser
from llamafactory.hparams import (
    DataArguments, FinetuningArguments, GeneratingArguments, ModelArguments, TrainingArguments)
kinds = (ModelArguments, DataArguments, TrainingArguments, FinetuningArguments, GeneratingArguments)
read = []
for name in sorted(__import__("glob").glob("*.yaml")):
    model, data, train, tune, _ = HfArgumentParser(kinds).parse_dict(yaml.safe_load(open(name)))
    read.append([name, train.per_device_train_batch_size, tune.finetuning_type, tune.lora_rank,
                 tune.lora_alpha, model.quantization_bit, data.cutoff_len, tune.use_dora])
print(json.dumps(read))
"""


def test_llama_factory_reads_every_file(llama_factory_source: Path, tmp_path: Path) -> None:
    libraries = tmp_path / "libraries"
    run_pip("install", "-q", "--no-deps", "--target", str(libraries), "omegaconf",
            "antlr4-python3-runtime==4.9.3")  # fmt: skip
    files = tmp_path / "files"
    files.mkdir()
    runs = {}
    for strategy, adapter in CASES:
        run = a_run(ADAPTERS[adapter], STRATEGIES[strategy])
        table = on_cpu(yaml.safe_load(export_run(run, "llama-factory").text))
        name = f"{strategy}-{adapter}.yaml".replace(" ", "-")
        # It refuses pure bf16 without GPUs.
        (files / name).write_text(yaml.safe_dump({**table, "pure_bf16": False}))
        runs[name] = run
    read = read_by(LLAMA_FACTORY, files, llama_factory_source / "src", libraries)
    assert {row[0] for row in read} == set(runs)
    for name, micro_batch, kind, rank, alpha, bits, length, dora in read:
        run = runs[name]
        # It keeps one token of packed sequences for padding.
        assert (micro_batch, length) == (run.strategy.micro_batch, run.job.seq_len - 1)
        if run.adapter is None or run.adapter.rank is None:
            assert kind == "full"
            continue
        assert (kind, rank, alpha) == ("lora", run.adapter.rank, round(run.adapter.scale))
        assert bits == {"nf4": 4, "int8": 8}.get(run.adapter.base)
        assert dora is run.adapter.dora


def outcomes(folder: Path) -> Counter[str]:
    """What becomes of every YAML; any error but a sentence fails the test."""
    found: Counter[str] = Counter()
    for file in sorted([*folder.rglob("*.yaml"), *folder.rglob("*.yml")]):
        try:
            found[import_file(file).what] += 1
        except SpecError as error:
            assert error.problems
            found["refused"] += 1
    return found


def test_every_example_of_axolotl_is_read_or_refused(axolotl_source: Path) -> None:
    """Of version 0.19, 251 are read; refused are 18: other tasks, and files for clouds."""
    found = outcomes(axolotl_source / "examples")
    assert found["an axolotl configuration"] > 8 * found["refused"]
    assert set(found) <= {"an axolotl configuration", "refused"}


def test_every_example_of_llama_factory_is_read_or_refused(llama_factory_source: Path) -> None:
    """Of version 0.9.5, 53 are read; refused are 29: its v1 form, other tasks, and inference."""
    found = outcomes(llama_factory_source / "examples")
    assert found["a LLaMA-Factory configuration"] > found["refused"]


def test_the_script_for_the_trainer_trains_adapters(tmp_path: Path) -> None:
    """One process, a tiny model from a folder, two steps: peft's files are written."""
    for needed in ("transformers", "peft", "datasets", "tokenizers", "accelerate"):
        pytest.importorskip(needed)
    from tests.stacks.tiny_checkpoint import save_tiny_llama

    save_tiny_llama(tmp_path / "model")
    rows = [json.dumps({"text": "a b c d e f g h " * 20}) for _ in range(40)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    from shardwise.spec.run import run_from_dict

    run = run_from_dict(
        {
            "model": {"pretrained": str(tmp_path / "model")},
            "cluster": "1x1xCPU",
            "adapter": {"rank": 4, "base": "fp32"},
            "job": {"seq_len": 32},
            "strategy": {"kind": "single", "micro_batch": 2, "param_dtype": "fp32"},
            "train": {"steps": 2, "trackers": [], "log_every": 1, "folder": "out"},
            "data": {"path": str(tmp_path / "data.jsonl")},
        }
    ).resolved()
    (tmp_path / "train.py").write_text(export_run(run, "trainer").text)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"]) == (4, 8)
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
