"""Compare one training step on the engine with its prediction."""

from __future__ import annotations

import pytest

from shardwise.predict.configurations import Configurations
from shardwise.predict.estimate import traffic_of
from shardwise.predict.memory import predict_memory
from shardwise.pytorch.adapted import adapt
from shardwise.spec.model import ModelSpec
from shardwise.spec.optimizer import Optimizer
from shardwise.spec.strategy import Strategy
from shardwise.step.profile import by_operation
from shardwise.units.decoder import decoder_units
from shardwise.units.division import Division
from shardwise.units.expert import divide_experts
from shardwise.units.module import module_units
from tests.distributed.engine_run import freeze, run_case
from tests.distributed.workers import Workers
from tests.units.reduced import build

# The largest error of a predicted peak.
PEAK_TOLERANCE = 0.03


def assert_agrees(
    workers: Workers,
    spec: ModelSpec,
    strategy: Strategy,
    seq_len: int,
    frozen: tuple[str, ...] = (),
    *,
    peak: float = PEAK_TOLERANCE,
    optimizer: Optimizer = "adamw",
) -> None:
    """Calls, bytes and state bytes must be equal, peak memory within `peak`; on every rank.

    Parameters whose name contains one of `frozen` are not trained; the model is then traced.
    """
    # On a CPU there is nowhere to offload to: parameters stay in the same memory. What an offloaded
    # optimizer adds does too; offloaded activations are counted apart.
    elsewhere = [part for part in ("optimizer", "activations") if strategy.offloads(part)]
    here = strategy.but(offload=elsewhere)
    columns = Configurations.of([here])
    dtype, autocast = strategy.param_dtype, strategy.autocast
    if frozen:
        module = build(spec, attention="sdpa")
        freeze(module, frozen)
        units = module_units(module, seq_len, dtype, autocast=autocast)
        if strategy.expert > 1:
            units = divide_experts(units, Division.of(strategy))
    elif spec.adapter is not None and spec.adapter.train:
        module = adapt(build(spec, attention="sdpa"), spec.adapter)
        units = module_units(module, seq_len, dtype, autocast=autocast)
    else:
        division = Division.of(strategy)
        units = decoder_units(spec, seq_len, dtype, autocast=autocast, division=division)
    units = units.grouped(strategy.blocks_per_unit)
    collectives = {
        f"{op}/{size}/{axis}": both
        for (op, size, axis), both in by_operation(traffic_of(units, here)).items()
    }
    memory = predict_memory(units, columns, optimizer)
    resting = memory.phases["optimizer step"]
    updated_there = here.offloads("optimizer")
    only_states = Configurations.of([here.but(offload="optimizer" if updated_there else False)])
    on_host = float(predict_memory(units, only_states, optimizer).host_bytes[0])
    activations_on_host = float(memory.host_bytes[0]) - on_host
    predicted = float(memory.peak_bytes[0]) + on_host
    case = {
        "model": spec.model_dump(mode="json"),
        "strategy": strategy.model_dump(mode="json"),
        "seq_len": seq_len,
        "enough_bytes": int(predicted * (1 + peak)),
        "frozen": frozen,
        "optimizer": optimizer,
    }
    [ranks] = workers.run(run_case, strategy.devices, [case])
    # The last device of a group has fewer rows of a vocabulary that the group cannot divide, and
    # DDP reduces no padding.
    uneven = strategy.kind == "ddp" and spec.vocab % strategy.tensor > 0
    for measured in ranks[: strategy.tensor - 1] if uneven else ranks:
        assert measured["collectives"] == collectives
    states = ranks[0]["host_gradient_bytes"] + ranks[0]["optimizer_bytes"]
    for measured in ranks:
        assert measured["parameter_bytes"] <= resting["parameters"][0]
        assert measured["optimizer_bytes"] <= (on_host or resting["optimizer"][0])
    # Rank 0 holds the most where a dimension cannot be divided evenly, and is what is predicted.
    assert ranks[0]["parameter_bytes"] == resting["parameters"][0]
    assert states == (on_host if updated_there else resting["optimizer"][0])
    assert ranks[0]["host_activation_bytes"] == pytest.approx(activations_on_host, rel=peak)
    error = predicted / ranks[0]["peak_bytes"] - 1
    assert abs(error) <= peak, f"peak {error:+.2%}: {predicted} predicted, {ranks}"
