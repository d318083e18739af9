"""DPO of other stacks is read as DPO, planned with its reference model, and written back."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import shardwise
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec, run_from_dict
from shardwise.stacks.read.imports import import_file
from shardwise.stacks.write.exports import STACKS, export_run

yaml = pytest.importorskip("yaml")

SCRIPT = """
from trl import DPOConfig, DPOTrainer
args = DPOConfig(per_device_train_batch_size=2{more})
DPOTrainer("Qwen/Qwen3-8B", args=args)
"""
AXOLOTL = {"base_model": "x", "micro_batch_size": 2, "sequence_len": 512, "learning_rate": 1e-6}
FACTORY = {"model_name_or_path": "x", "stage": "dpo", "per_device_train_batch_size": 2,
           "finetuning_type": "full"}  # fmt: skip
# File name, contents, and whether a reference model runs.
FILES: dict[str, tuple[str, str, bool]] = {
    "TRL script": ("a.py", SCRIPT.format(more=""), True),
    "TRL, computed before": ("a.py", SCRIPT.format(more=", precompute_ref_log_probs=True"), False),
    "TRL file": ("a.yaml", yaml.safe_dump({"per_device_train_batch_size": 2, "beta": 0.1,
                                           "precompute_ref_log_probs": False}), True),
    "axolotl dpo": ("a.yaml", yaml.safe_dump({**AXOLOTL, "rl": "dpo"}), True),
    "axolotl ipo": ("a.yaml", yaml.safe_dump({**AXOLOTL, "rl": "ipo"}), True),
    "LLaMA-Factory": ("a.yaml", yaml.safe_dump(FACTORY), True),
    "LLaMA-Factory simpo": ("a.yaml", yaml.safe_dump({**FACTORY, "pref_loss": "simpo"}), False),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_dpo_is_read_as_dpo(name: str, tmp_path: Path) -> None:
    file, text, reference = FILES[name]
    (tmp_path / file).write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = shardwise.import_(tmp_path / file, "gpt2", "8xH100-SXM")
    assert found.run is not None
    assert found.run.job.method == "dpo"
    assert found.run.job.has_reference is reference
    # Two pairs are four sequences.
    assert found.run.strategy.micro_batch == 4
    assert found.imported.objective == "DPO"


def run_of(adapter: bool = False, **strategy: Any) -> RunSpec:
    sections = {
        "model": "llama-3-8b",
        "cluster": "8xH100-SXM",
        "job": {"seq_len": 1024, "method": "dpo"},
        "strategy": {"kind": "zero3", "micro_batch": 4, "accumulate": 2, **strategy},
        "train": {"steps": 50},
        **({"adapter": {"rank": 16, "targets": ["q_proj"]}} if adapter else {}),
    }
    return run_from_dict(sections).resolved()


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize(
    ("stack", "key"),
    [("trl", "per_device_train_batch_size"), ("axolotl", "micro_batch_size"),
     ("llama-factory", "per_device_train_batch_size")],
)  # fmt: skip
def test_dpo_is_written_and_read_back(stack: str, key: str, adapter: bool, tmp_path: Path) -> None:
    run = run_of(adapter)
    written = export_run(run, stack)
    assert yaml.safe_load(written.text)[key] == 2
    assert "micro_batch" not in {name for one in written.differences for name in one.fields}
    (tmp_path / written.name).write_text(written.text)
    back = import_file(tmp_path / written.name)
    assert back.job["method"] == "dpo"
    assert back.strategy["micro_batch"] == 4


def test_trl_gathers_a_reference_whole() -> None:
    def about(run: RunSpec) -> list[str]:
        return [one.about for one in export_run(run, "trl").differences]

    assert "Reference model" in about(run_of())
    assert "Reference model" not in about(run_of(adapter=True))
    assert "Reference model" not in about(run_of(kind="ddp"))


@pytest.mark.parametrize(
    "stack", [name for name in STACKS if name not in ("trl", "axolotl", "llama-factory",
                                                      "accelerate")]
)  # fmt: skip
def test_other_stacks_refuse_it(stack: str) -> None:
    with pytest.raises(SpecError, match=r"job\.method"):
        export_run(run_of(), stack)


def test_a_plan_keeps_pairs_whole() -> None:
    run = run_of()
    plan = shardwise.plan(run=run, for_stack="trl")
    assert plan.winner is not None
    assert plan.winner.strategy.micro_batch % 2 == 0
    assert run.job.tokens_per_step(run.strategy) == plan.problem.job.tokens_per_step(
        plan.winner.strategy
    )
