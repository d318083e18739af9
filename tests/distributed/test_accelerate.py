"""Exported runs started by `accelerate launch`: sharded as the strategy says, or as it is told."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from shardwise.stacks.write.accelerate import export
from tests.distributed.launch import output_of, results
from tests.stacks.runs import tiny

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

pytestmark = pytest.mark.nightly

SCRIPT = Path(__file__).with_name("accelerate_run.py")


def launch(folder: Path, cluster: str, strategy: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """What rank 0 saw, and the losses that were announced."""
    run = tiny(cluster=cluster, strategy=strategy, job={"global_batch": None})
    written = export(run)
    (folder / written.name).write_text(written.text)
    words = shlex.split(written.command.replace("train.py", shlex.quote(str(SCRIPT))))
    variables = dict(word.split("=", 1) for word in words if "=" in word and "/" not in word)
    command = [word for word in words if word.partition("=")[0] not in variables]
    command[2:2] = ["--main_process_port", "0"]
    settings: dict[str, Any] = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", **variables}
    [found] = results(output_of(command, folder, **settings))
    return found, " ".join(written.unsupported)


@pytest.mark.parametrize("kind", ["zero3", "zero2"])
def test_blocks_are_resharded_as_the_strategy_says(kind: str, tmp_path: Path) -> None:
    strategy = {"kind": kind, "param_dtype": "bf16", "micro_batch": 1, "accumulate": 2}
    seen, losses = launch(tmp_path, "1x2xH100-SXM", strategy)
    assert seen["sharded"]
    assert seen["placements"] == "(Shard(dim=0),)"
    assert seen["resharded"] == [kind == "zero3"] * 2
    # What the losses say: bf16 reductions over an fp32 master, units of the embedding and the head
    # beside the 3 blocks, and no reduction before the last micro-batch.
    assert seen["dtypes"] == [["torch.bfloat16", "torch.bfloat16"]]
    assert seen["master"] == "torch.float32"
    assert "reduce_dtype = fp32" in losses
    assert seen["reductions"][0] == 0
    assert seen["reductions"][1] > 0
    assert "grad_sync = every" in losses
    assert "puts both in the root unit" in losses


def test_on_cpus_it_runs_ddp_and_says_so(tmp_path: Path) -> None:
    seen, losses = launch(tmp_path, "1x2xCPU", {"kind": "zero3", "micro_batch": 1})
    assert seen["accelerate says"] == "MULTI_CPU"
    assert seen["wrapped"] == "DistributedDataParallel"
    assert not seen["sharded"]
    assert "accelerate shards on GPUs only" in losses
