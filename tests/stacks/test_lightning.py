"""The script for Lightning as text: it is Python, names stay text, and losses are told."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.spec.run import RunSpec
from shardwise.stacks.write.lightning import export
from tests.command import PATIENCE_S
from tests.stacks.runs import HOSTILE_NAME, large, tiny

RUNS = {
    "zero3": tiny(),
    "hybrid": large(strategy={"kind": "hsdp", "accumulate": 2}),
    "ddp": tiny(strategy={"kind": "ddp", "param_dtype": "bf16", "ddp_bucket_mib": 10}),
    "powersgd": large(strategy={"kind": "ddp", "compress": "powersgd", "powersgd_rank": 2}),
    "single": tiny(cluster="1x1xCPU", strategy={"kind": "single"}),
    "transformers": large(model="gpt2", job={"seq_len": 1024}),
    "saves": tiny(train={"checkpoint": {"every": 5, "keep": 0}, "trackers": ["tensorboard"]}),
    "at the end": tiny(train={"checkpoint": {"minutes": 0}, "trackers": None}),
    "silent": tiny(train={"checkpoint": False, "schedule": "constant", "clip_norm": 0}),
    "hostile": tiny(model={"name": HOSTILE_NAME}),
}


def arguments(run: RunSpec) -> dict[str, Any]:
    """What the Trainer is made with, as text."""
    tree = ast.parse(export(run).text)
    [call] = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Trainer"
    ]
    return {word.arg or "": ast.unparse(word.value) for word in call.keywords}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_it_is_python(run: RunSpec) -> None:
    compile(export(run).text, "lightning_run.py", "exec")


def test_what_the_trainer_is_told() -> None:
    found = arguments(RUNS["hybrid"])
    assert found["devices"] == "8"
    assert found["num_nodes"] == "2"
    assert found["accelerator"] == "'gpu'"
    whole = "ModelParallelStrategy(data_parallel_size=16, tensor_parallel_size=1)"
    assert found["strategy"] == whole
    # The policy of fully_shard casts.
    assert found["precision"] == "'32-true'"
    ddp = arguments(RUNS["ddp"])
    assert ddp["precision"] == "'bf16-mixed'"
    assert "bucket_cap_mb=BUCKET_MIB" in ddp["strategy"]
    compressed = arguments(RUNS["powersgd"])["strategy"]
    assert "ddp_comm_state=powersgd_state()" in compressed
    assert "ddp_comm_hook=communication_hook()" in compressed
    assert "gradient_clip_val" not in arguments(RUNS["silent"])
    assert arguments(RUNS["silent"])["enable_checkpointing"] == "False"
    assert "save_top_k=-1" in arguments(RUNS["saves"])["callbacks"]
    assert "TensorBoardLogger" in arguments(RUNS["saves"])["logger"]


def test_no_minutes_and_no_steps_save_only_at_the_end() -> None:
    never = arguments(RUNS["at the end"])
    assert never["enable_checkpointing"] == "False"
    assert "callbacks" not in never
    text = export(RUNS["at the end"]).text
    assert "ModelCheckpoint" not in text
    assert "trainer.save_checkpoint(OUTPUT" in text
    assert "save_checkpoint" not in export(RUNS["silent"]).text
    steps = arguments(tiny(train={"checkpoint": {"minutes": 0, "every": 5}}))
    assert "every_n_train_steps=SAVE_EVERY" in steps["callbacks"]
    minutes = arguments(tiny(train={"checkpoint": {"minutes": 0.5}}))
    assert "train_time_interval=timedelta(minutes=0.5)" in minutes["callbacks"]


def test_trackers_that_are_asked_for_are_all_there_are() -> None:
    assert arguments(RUNS["zero3"])["logger"] == "[CSVLogger(OUTPUT)]"
    both = arguments(tiny(train={"trackers": ["wandb", "tensorboard"]}))["logger"]
    expected = ("CSVLogger(OUTPUT)", "WandbLogger(save_dir=OUTPUT)", "TensorBoardLogger(OUTPUT)")
    assert both == f"[{', '.join(expected)}]"


@pytest.mark.nightly
def test_what_a_run_without_minutes_and_trackers_leaves(tmp_path: Path) -> None:
    """One checkpoint, and events of TensorBoard where it is installed."""
    pytest.importorskip("lightning")
    run = tiny(
        cluster="1x1xCPU",
        strategy={"kind": "single"},
        job={"seq_len": 32, "global_batch": None},
        train={"steps": 3, "checkpoint": {"minutes": 0}, "trackers": None},
    )
    (tmp_path / "lightning_run.py").write_text(export(run).text)
    done = subprocess.run(
        [sys.executable, "lightning_run.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    saved = [path.relative_to(tmp_path) for path in tmp_path.rglob("*.ckpt")]
    assert saved == [Path("trained/last.ckpt")]
    installed = importlib.util.find_spec("tensorboard") is not None
    assert bool(list(tmp_path.rglob("events.out.tfevents.*"))) is installed


def test_names_are_text() -> None:
    """Apart from strings and comments, the script is that of a model with a plain name."""

    def code(run: RunSpec) -> str:
        tree = ast.parse(export(run).text)
        tree.body.pop(0)  # the description
        return ast.dump(tree)

    assert code(RUNS["hostile"]) == code(RUNS["zero3"])


def test_what_it_does_not_do_is_told() -> None:
    keys = {loss.partition(":")[0] for loss in export(RUNS["saves"]).unsupported}
    told = {"train.non_finite", "train.checkpoint", "train.checkpoint.minutes", "train.restart"}
    assert keys == told
    assert "train.checkpoint" not in "".join(export(RUNS["silent"]).unsupported)
