"""Stochastic rounding of updates in bf16: on average exact, seeded by run, step and shard."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchao")
import torch
from torch import nn

from shardwise.engine.noise import seeded
from shardwise.engine.sync import store_strategy
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from shardwise.spec.train import TrainSettings
from shardwise.trainer.optimizer import make_optimizer

# A quarter of the distance between two bf16 numbers just below 1.
RATE, STEPS, WIDTH = 2.0**-10, 100, 4096


def trained(states: str, seed: int = 0) -> torch.Tensor:
    """Ones after updates by RATE each, which is what Adam does with a constant gradient."""
    settings = TrainSettings(
        learning_rate=RATE, weight_decay=0.0, seed=seed, schedule="constant", warmup_steps=0
    )
    strategy = Strategy.read({"kind": "single", "states": states, "param_dtype": "bf16"})
    model = store_strategy(nn.Linear(WIDTH, 1, bias=False).to(torch.bfloat16), strategy)
    optimizer = make_optimizer(model, "adamw", settings)
    [weight] = model.parameters()
    nn.init.ones_(weight)
    for _ in range(STEPS):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert {one.dtype for one in optimizer.state[weight].values() if one.numel() > 1} == {
        torch.bfloat16
    }
    return weight.detach().float()


def test_small_updates_are_lost_in_bf16_and_kept_on_average_with_stochastic_rounding() -> None:
    assert trained("bf16").unique().tolist() == [1.0]
    rounded = trained("bf16+stochastic")
    # Each update is kept with probability 1/4 of four times its size.
    one_step = 4 * RATE * (0.25 * 0.75) ** 0.5
    deviation = one_step * (STEPS / WIDTH) ** 0.5
    assert abs(float(rounded.mean()) - (1 - STEPS * RATE)) < 5 * deviation + 1e-3
    assert float(rounded.std()) > 0


def test_the_seed_of_the_run_decides_and_dropout_draws_as_before() -> None:
    first, state = trained("bf16+stochastic"), torch.get_rng_state()
    torch.rand(3)
    again = trained("bf16+stochastic")
    assert torch.equal(first, again)
    assert not torch.equal(first, trained("bf16+stochastic", seed=1))
    torch.set_rng_state(state)
    expected = torch.rand(3)
    torch.set_rng_state(state)
    with seeded(torch.zeros(1), 3, 4):
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    assert not torch.equal(inside, expected)


def test_optimizers_without_stochastic_rounding_are_refused() -> None:
    model = store_strategy(
        nn.Linear(2, 2), Strategy.read({"kind": "single", "states": "bf16+stochastic"})
    )
    with pytest.raises(SpecError, match="no stochastic rounding"):
        make_optimizer(model, "sgd", TrainSettings())
