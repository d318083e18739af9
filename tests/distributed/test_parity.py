"""Every strategy trains the same model: parameters after six steps against one process, in fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import run_workers
from tests.units.reduced import reduced

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

SPEC = reduced("llama", layers=3, hidden=64, heads=4, head_dim=16, ffn=96, vocab=101, tied=True)
FP64 = {"param_dtype": "fp64", "reduce_dtype": "fp64", "master_dtype": "fp64"}


def case(clip: float, **strategy: Any) -> dict[str, Any]:
    return {
        "model": SPEC.model_dump(mode="json"),
        "strategy": {**FP64, **strategy},
        "clip": clip,
    }


def run(folder: Path, processes: int, cases: list[dict[str, Any]]) -> list[tuple[Any, str]]:
    folder.mkdir(exist_ok=True)
    numbered = [{**c, "file": str(folder / f"{i}.pt")} for i, c in enumerate(cases)]
    results = run_workers("tests.distributed.parity_run", processes, numbered, folder)
    return [
        (torch.load(c["file"], weights_only=True), r["digest"])
        for c, r in zip(numbered, results, strict=True)
    ]


TWO = [{"kind": kind} for kind in ("ddp", "zero1", "zero2", "zero3")]
TWO += [{"kind": "zero3", "recompute": policy} for policy in ("full", "selective", 0.5)]
FOUR = [
    {"kind": "zero3", "shard": 2},
    {"kind": "zero3", "reshard_after_forward": 2},
    {"kind": "zero3", "prefetch": 0},
    {"kind": "zero3", "prefetch": 2, "blocks_per_unit": 2},
]


def test_two_and_four_processes_train_what_one_does(tmp_path: Path) -> None:
    clips = (0.0, 0.5)
    alone = run(tmp_path / "one", 1, [case(clip, kind="single") for clip in clips])
    for processes, kinds in ((2, TWO), (4, FOUR)):
        cases = [
            case(clip, **kind, accumulate=accumulate)
            for clip in clips
            for kind in kinds
            for accumulate in (1, 2)
        ]
        found = run(tmp_path / str(processes), processes, cases)
        digests: dict[tuple[float, int], set[str]] = {}
        for given, (parameters, digest) in zip(cases, found, strict=True):
            reference, _ = alone[clips.index(given["clip"])]
            difference = (parameters - reference).abs().max().item()
            assert difference <= 1e-12, (difference, given["strategy"], given["clip"])
            strategy = given["strategy"]
            # DDP and zero1 sum micro-batches before they reduce, and hybrid sharding reduces in
            # two steps: the same sum in another order. The others are the same to the bit.
            if strategy["kind"] in ("zero2", "zero3") and "shard" not in strategy:
                digests.setdefault((given["clip"], strategy["accumulate"]), set()).add(digest)
        assert {key: len(found) for key, found in digests.items()} == dict.fromkeys(digests, 1)
