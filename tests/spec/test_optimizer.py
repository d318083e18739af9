"""States by formula, against what torch and torchao hold on one process."""

from __future__ import annotations

import pytest

from shardwise.predict.program.optimizer_states import shard_of
from shardwise.spec.optimizer import LOW_BIT, OPTIMIZERS, LowBit, Optimizer, Shard, state_bytes
from shardwise.units.unit import Parameter

# Below 4,096 elements; not whole blocks; blocks of 128 only; whole blocks; a vector; experts.
SHAPES = [(63, 65), (64, 65), (33, 128), (64, 64), (8192,), (7,), (3, 32, 64)]


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind != "lion"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_are_those_that_the_optimizer_holds(kind: Optimizer, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    if kind in LOW_BIT:
        pytest.importorskip("torchao")
    from shardwise.engine.sync import store_strategy
    from shardwise.pytorch.private import plain_tensors
    from shardwise.spec.strategy import Strategy
    from shardwise.spec.train import TrainSettings
    from shardwise.trainer.optimizer import make_optimizer

    class Weights(torch.nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            made = [torch.randn(shape, dtype=getattr(torch, dtype)) for shape in SHAPES]
            self.weights = torch.nn.ParameterList(made)

    blocks = torch.nn.ModuleList([Weights(), Weights()])
    table = torch.nn.Embedding(96, 64, dtype=getattr(torch, dtype))
    model = torch.nn.ModuleDict({"table": table, "blocks": blocks})
    optimizer = make_optimizer(
        store_strategy(model, Strategy(kind="single")), kind, TrainSettings(momentum=0.9)
    )
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()

    for name, parameter in model.named_parameters():
        held = sum(
            plain.nbytes
            for state in optimizer.state[parameter].values()
            if isinstance(state, torch.Tensor) and state.ndim
            for plain in plain_tensors(state)
        )
        shape = tuple(parameter.shape)
        shard = Shard(shape, (parameter.numel(),) * 2, name.startswith("blocks"))
        assert state_bytes(kind, shard, parameter.element_size()) == held, (name, shape)


def test_large_parameters_take_what_the_documentation_says() -> None:
    shard = Shard((8192, 8192), (8192 * 8192,) * 2)

    def per_parameter(kind: Optimizer) -> float:
        return state_bytes(kind, shard, 4) / shard.numel

    assert per_parameter("adamw") == 8
    assert per_parameter("muon") == 4
    # Codes of both moments, and a scale of four bytes per block.
    assert per_parameter("adamw-8bit") == pytest.approx(2 * (1 + 4 / 256), rel=1e-4)
    assert per_parameter("adamw-4bit") == pytest.approx(2 * (1 / 2 + 4 / 128), rel=1e-4)
    assert per_parameter("adamw-fp8") == 2 * (1 + 4 / 256)
    assert per_parameter("adafactor") < 0.01


def test_finer_shards_bring_full_states_back() -> None:
    weight = Parameter("w", (128, 128))

    def on(shards: int) -> int:
        return state_bytes("adamw-8bit", shard_of(weight, shards), 4)

    assert on(4) < 8 * 128 * 128 // 4
    assert on(8) == 8 * 128 * 128 // 8
    # The state of each of 8 devices is larger than that of each of 4.
    assert on(8) > on(4)


def test_all_shards_are_quantised_or_none() -> None:
    # Of 127 rows, three devices hold 32 and the last 31, which is less than 4,096 elements.
    shard = shard_of(Parameter("w", (127, 128)), 4)
    assert shard == Shard((32, 128), (32 * 128, 31 * 128))
    assert not LowBit(bits=8, block=256).quantises(shard.numels)
    assert state_bytes("adamw-8bit", shard, 4) == 8 * 32 * 128
