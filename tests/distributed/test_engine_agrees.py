"""What PyTorch's engine really does on 2 and 4 processes, against the prediction.

Collectives and state bytes to the byte; peak memory within 3 %.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.predict.configurations import Configurations
from shardwise.predict.memory import predict_memory
from shardwise.predict.traffic import predict_traffic
from shardwise.spec import ModelSpec, Strategy
from shardwise.units.decoder import decoder_units
from tests.distributed.launch import run_workers
from tests.predict.toy import resolve
from tests.units.reduced import reduced

pytest.importorskip("torch")
pytest.importorskip("transformers")

GPT2 = reduced("gpt2", layers=5, hidden=256, vocab=1003)
LLAMA = reduced("llama", layers=5, hidden=256, vocab=1003)
TIED = reduced("gpt2", layers=3, hidden=128, head_dim=32, ffn=512, vocab=16001)
VOCABULARY = reduced("llama", layers=3, hidden=128, head_dim=32, ffn=344, vocab=16001)


def case(
    spec: ModelSpec, strategy: Strategy, seq_len: int = 64, peak: bool = True
) -> dict[str, Any]:
    return {
        "model": spec.model_dump(mode="json"),
        "strategy": strategy.model_dump(mode="json"),
        "seq_len": seq_len,
        "peak": peak,
    }


def check(cases: list[dict[str, Any]], processes: int, folder: Path) -> None:
    results = run_workers("tests.distributed.engine_run", processes, cases, folder)
    errors = {}
    for given, found in zip(cases, results, strict=True):
        strategy = Strategy.model_validate(given["strategy"])
        columns = Configurations.of([strategy])
        units = decoder_units(
            ModelSpec.model_validate(given["model"]),
            given["seq_len"],
            strategy.param_dtype,
            autocast=strategy.autocast,
        ).grouped(strategy.blocks_per_unit)
        sizes = {
            "shard": strategy.shard,
            "replicate": strategy.replicate,
            "reshard": strategy.reshard_after_forward,
        }
        expected: dict[str, list[int]] = {}
        for collective in predict_traffic(units, columns):
            key = f"{collective.op}/{sizes[collective.group]}"
            entry = expected.setdefault(key, [0, 0])
            entry[0] += int(collective.calls[0])
            entry[1] += int(collective.bytes[0])
        assert found["collectives"] == expected, given["strategy"]
        memory = predict_memory(units, columns)
        resting = memory.phases["optimizer step"]
        assert found["parameter_bytes"] == resting["parameters"][0]
        assert found["optimizer_bytes"] == resting["optimizer"][0]
        if given["peak"]:
            settings = strategy.model_dump(exclude_defaults=True)
            name = f"{given['model']['family']}-{given['model']['vocab']} {settings}"
            errors[name] = float(memory.peak_bytes[0]) / found["peak_bytes"] - 1
    print({name: f"{error:+.1%}" for name, error in errors.items()})
    assert {name: error for name, error in errors.items() if abs(error) > 0.03} == {}


def test_two_processes(tmp_path: Path) -> None:
    cases = [
        case(spec, resolve(kind, 2, accumulate=k, grad_sync=sync, param_dtype=dtype))
        for spec in (GPT2, LLAMA)
        for kind in ("ddp", "zero1", "zero2", "zero3")
        for k, sync in ((1, None), (3, "every"), (3, "last"))
        for dtype in ("fp32", "bf16")
    ]
    cases.append(case(LLAMA, resolve("zero3", 2, blocks_per_unit=2)))
    cases.append(case(LLAMA, resolve("zero3", 2, recompute="full")))
    cases.append(case(LLAMA, resolve("zero3", 2, accumulate=2, reshard_after_backward=False)))
    cases.append(case(GPT2, resolve("zero3", 2, reduce_dtype="bf16")))
    cases.append(case(GPT2, resolve("ddp", 2, ddp_bucket_mib=2.0, param_dtype="fp32")))
    cases.append(case(LLAMA, resolve("zero3", 2, forward_prefetch=2)))
    cases.append(case(LLAMA, resolve("zero3", 2, prefetch=2, forward_prefetch=1)))
    check(cases, 2, tmp_path)


def test_four_processes(tmp_path: Path) -> None:
    cases = [
        case(spec, resolve("zero3:2", 4, accumulate=k, grad_sync=sync))
        for spec in (GPT2, LLAMA)
        for k, sync in ((1, None), (2, "every"), (2, "local"), (2, "last"))
    ]
    cases.append(case(LLAMA, resolve("zero2:2", 4)))
    cases.append(case(LLAMA, resolve("zero3", 4)))
    cases.append(case(LLAMA, resolve("zero3", 4, reshard_after_forward=2, accumulate=2)))
    cases.append(case(GPT2, resolve("ddp", 4, accumulate=2)))
    check(cases, 4, tmp_path)


def test_the_measured_table_of_36_blocks(tmp_path: Path) -> None:
    spec = reduced("llama", layers=36, hidden=16, heads=2, kv_heads=1, head_dim=8, ffn=32, vocab=64)
    strategies = [
        resolve("zero3", 2),
        resolve("zero2", 2),
        resolve("zero3", 2, accumulate=2, grad_sync="last", reshard_after_backward=False),
    ]
    results = run_workers(
        "tests.distributed.engine_run",
        2,
        [case(spec, s, 8, peak=False) for s in strategies],
        tmp_path,
    )
    counts = [{key: calls for key, (calls, _) in r["collectives"].items()} for r in results]
    assert counts == [
        {"all_gather/2": 73, "reduce_scatter/2": 37},
        {"all_gather/2": 37, "reduce_scatter/2": 37},
        {"all_gather/2": 73 + 36, "reduce_scatter/2": 37},
    ]


def test_peak_memory(tmp_path: Path) -> None:
    settings: list[tuple[str, dict[str, Any]]] = [
        ("zero3", {"param_dtype": "fp32"}),
        ("zero3", {}),
        ("zero2", {}),
        ("zero3", {"recompute": "full"}),
        ("zero3", {"accumulate": 2}),
        ("zero3", {"accumulate": 3, "grad_sync": "last"}),
        ("zero1", {"accumulate": 2}),
        ("zero2", {"accumulate": 3, "param_dtype": "fp32"}),
        ("ddp", {"param_dtype": "fp32"}),
        ("zero3", {"micro_batch": 4}),
        ("zero3", {"micro_batch": 4, "recompute": "full", "param_dtype": "fp32"}),
        ("zero3", {"blocks_per_unit": 2}),
    ]
    cases = [
        case(spec, resolve(kind, 2, **more), seq_len=128)
        for spec in (GPT2, LLAMA, VOCABULARY)
        for kind, more in settings
    ]
    # The two gradients of a tied table and their sum.
    cases += [
        case(TIED, resolve(kind, 2, **more), seq_len=16)
        for kind, more in settings
        if kind in ("ddp", "zero3") and "micro_batch" not in more
    ]
    check(cases, 2, tmp_path)
