"""Optimizers with quantised states on real processes, against prediction, one process and resume.

Blocks of a quantised state begin where a shard begins, so that the same training on another
number of shards quantises in other blocks, and agrees only within the rounding of its states.
"""

from __future__ import annotations

import contextlib
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint.format.storage import find_storage
from shardwise.spec.model import ModelSpec
from shardwise.spec.optimizer import LOW_BIT, OPTIMIZERS, Optimizer
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import parse_strategy
from shardwise.stacks.write.exports import export_run
from tests.distributed.runs import losses, write
from tests.distributed.workers import Workers
from tests.gate import in_gate
from tests.predict.toy import resolve
from tests.stacks.runs import tiny
from tests.units.reduced import reduced

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("torchao")
from shardwise.checkpoint.format.sharding import full_box
from shardwise.checkpoint.verify.opened import open_checkpoint
from tests.distributed.agreement import assert_agrees
from tests.distributed.optimizer_run import losses_of, optimizers_made
from tests.distributed.train_run import run_toml

# Keys and values have 64 x 128 elements, below 4,096 in four shards; queries are just large enough.
# Two shards of the table are 502 and 501 rows: whole blocks of 128, not of 256.
MODEL = reduced("llama", layers=3, hidden=128, head_dim=32, ffn=384, vocab=1003, kv_heads=2)
STRATEGIES = [
    ("ddp", 2, {}),
    ("zero2", 2, {}),
    ("zero3", 2, {}),
    ("zero3", 2, {"accumulate": 2, "recompute": "full", "param_dtype": "bf16"}),
    ("zero3", 2, {"master_dtype": "bf16", "param_dtype": "bf16"}),
    ("ddp", 4, {}),
    ("zero2", 4, {}),
    ("zero3", 4, {}),
    ("zero3:2", 4, {}),
]


# Each optimizer, kind, layout and precision in one of them.
GATE = [
    ("adamw-8bit", *STRATEGIES[3]),
    ("adamw-4bit", *STRATEGIES[4]),
    ("adamw-fp8", *STRATEGIES[5]),
    ("adamw-8bit", *STRATEGIES[6]),
    ("adamw-4bit", *STRATEGIES[8]),
]


@pytest.mark.parametrize(
    ("optimizer", "kind", "devices", "settings"),
    in_gate(GATE, [(one, *strategy) for one in LOW_BIT for strategy in STRATEGIES]),
)
def test_states_are_exact_and_the_peak_is_within_3_percent(
    workers: Workers, optimizer: Optimizer, kind: str, devices: int, settings: dict[str, Any]
) -> None:
    chosen = {"micro_batch": 8, "param_dtype": "fp32", **settings}
    strategy = resolve(kind, devices, **chosen)
    assert_agrees(workers, MODEL, strategy, seq_len=128, optimizer=optimizer)


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_states_of_whole_matrices_are_exact(workers: Workers, optimizer: Optimizer) -> None:
    strategy = resolve("ddp", 2, micro_batch=8, param_dtype="fp32")
    assert_agrees(workers, MODEL, strategy, seq_len=128, optimizer=optimizer)


# The largest relative difference of a loss from that of one process after 6 steps in fp32, of
# which 1e-5 is what another order of summation makes of it.
BOUNDS: dict[Optimizer, float] = {"adamw-8bit": 2e-3, "adamw-4bit": 2e-2, "adamw-fp8": 2e-3}


LAYOUTS = (("ddp", 2), ("zero3", 2), ("zero2", 4))


@pytest.mark.parametrize(
    ("optimizer", "kind", "devices"),
    in_gate(
        [(one, *layout) for one, layout in zip(BOUNDS, LAYOUTS, strict=True)],
        [(one, *layout) for one in BOUNDS for layout in LAYOUTS],
    ),
)
def test_losses_agree_with_one_process_within_a_bound(
    workers: Workers, optimizer: Optimizer, kind: str, devices: int
) -> None:
    def losses_on(kind: str, devices: int) -> list[float]:
        case = _case(MODEL, kind, devices, optimizer)
        [ranks] = workers.run(losses_of, devices, [case])
        return ranks[0]

    alone, sharded = losses_on("single", 1), losses_on(kind, devices)
    assert alone[-1] < alone[0]
    assert sharded == pytest.approx(alone, rel=BOUNDS[optimizer])
    # The first two losses do not depend on rounded states.
    assert sharded[:2] == pytest.approx(alone[:2], rel=1e-5)


def _case(spec: ModelSpec, kind: str, devices: int, optimizer: str) -> dict[str, Any]:
    strategy = resolve(kind, devices, micro_batch=4 // devices, param_dtype="fp32")
    return {
        "model": spec.model_dump(mode="json"),
        "strategy": strategy.model_dump(mode="json"),
        "optimizer": optimizer,
        "steps": 6,
    }


@pytest.mark.parametrize(
    ("optimizer", "background"),
    in_gate(
        [("adamw-8bit", False), ("muon", False)],
        [*product((*LOW_BIT, "muon", "adafactor"), (False, True))],
    ),
)
def test_a_resumed_run_is_equal_to_the_bit(
    workers: Workers, tmp_path: Path, optimizer: Optimizer, background: bool
) -> None:
    """Two steps and two more after a resume, against four at once; two uneven shards."""
    kind = "zero3" if optimizer in LOW_BIT else "ddp"
    checkpoint = f"[train.checkpoint]\nevery = 2\nbackground = {str(background).lower()}"
    fields: dict[str, Any] = {"kind": kind, "log_every": 1, "job": f'optimizer = "{optimizer}"'}

    def run(folder: Path, *steps: int) -> list[float]:
        folder.mkdir()
        for number in steps:
            # A schedule would depend on the number of steps.
            train = f'schedule = "constant"\n{checkpoint}'
            file = write(folder, steps=number, train=train, **fields)
            [ranks] = workers.run(run_toml, 2, [{"file": str(file)}])
            assert (ranks[0].get("reason"), ranks[0].get("steps")) == ("done", number), ranks
        return losses(folder)

    at_once, resumed = run(tmp_path / "once", 4), run(tmp_path / "twice", 2, 4)
    assert resumed == at_once
    assert _checksums(tmp_path / "twice") == _checksums(tmp_path / "once")


def _checksums(folder: Path, step: int = 4) -> dict[str, Any]:
    """Of all tensors in the checkpoint of a step."""
    place = find_storage(str(folder / "runs" / "it" / "checkpoints"))
    saved = open_checkpoint(place.folder(step))
    return {
        str(piece): piece.crc32
        for name, tensor in saved.tensors.items()
        for piece in saved.pieces(name, full_box(tensor.shape))
    }


def test_quantised_states_resume_only_as_they_were_saved(workers: Workers, tmp_path: Path) -> None:
    def run(**fields: str) -> Any:
        file = write(tmp_path, steps=2, train="[train.checkpoint]\nevery = 2", **fields)
        [ranks] = workers.run(run_toml, 2, [{"file": str(file)}])
        return ranks[0]

    assert run(job='optimizer = "adamw-8bit"')["reason"] == "done"
    assert "job.optimizer: was 'adamw-8bit'" in run(job='optimizer = "adamw"')["refused"]
    assert (
        "2 shards and would resume in 1"
        in run(job='optimizer = "adamw-8bit"', kind="ddp")["refused"]
    )


@pytest.mark.parametrize("kind", ["ddp", "zero2", "zero3", "ddp tp2", "zero3 tp2"])
def test_a_job_is_written_exactly_if_its_optimizer_can_be_made(workers: Workers, kind: str) -> None:
    """On two real ranks, against the exports that start the trainer."""
    strategy = resolve(kind, 2, param_dtype="fp32").model_dump(mode="json")
    case = {
        "model": MODEL.model_dump(mode="json"),
        "strategy": strategy,
        "optimizers": OPTIMIZERS,
    }
    [ranks] = workers.run(optimizers_made, 2, [case])
    fields = {**parse_strategy(kind), "micro_batch": 2}
    assert ranks[0] == ranks[1]
    assert "adamw" in ranks[0]
    for stack in ("slurm", "kubernetes"):
        assert _written(stack, fields) == ranks[0]


def _written(stack: str, strategy: dict[str, Any]) -> list[str]:
    """The optimizers with which a strategy is written for a stack."""
    written: list[str] = []
    for optimizer in OPTIMIZERS:
        run = tiny(strategy=strategy, job={"optimizer": optimizer})
        with contextlib.suppress(SpecError):
            export_run(run, stack)
            written.append(optimizer)
    return written
