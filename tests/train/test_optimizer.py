"""Fused SGD against torch's own, and updates that a flag on the device cancels."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from shardwise.engine.sync import store_strategy
from shardwise.pytorch.private import plain_tensors
from shardwise.spec.optimizer import Optimizer
from shardwise.spec.strategy import Strategy
from shardwise.spec.train import TrainSettings
from shardwise.trainer.optimizer import make_optimizer, set_learning_rate

SETTINGS = TrainSettings(learning_rate=0.1, momentum=0.9, weight_decay=0.01)


def model_and_optimizer(kind: Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = store_strategy(nn.Linear(5, 3), Strategy(kind="single"))
    return model, make_optimizer(model, kind, SETTINGS)


def reference(model: nn.Module, momentum: float) -> torch.optim.Optimizer:
    """Torch's for-loop implementation; weight decay for matrices only."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.01},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=momentum, foreach=False)


def set_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize(("kind", "momentum"), [("sgd", 0.0), ("momentum", 0.9)])
def test_updates_equal_those_of_torch(kind: Optimizer, momentum: float) -> None:
    model, optimizer = model_and_optimizer(kind)
    other = nn.Linear(5, 3)
    other.load_state_dict(model.state_dict())
    theirs = reference(other, momentum)
    for step in range(4):
        set_gradients(model, step)
        set_gradients(other, step)
        optimizer.step()
        theirs.step()
        for mine, expected in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-7)


def cancel(optimizer: torch.optim.Optimizer, flag: bool) -> None:
    """Set the flag that fused optimizers read on the device."""
    optimizer.found_inf = torch.tensor(float(flag))  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["adamw-8bit", "adamw-4bit", "adamw-fp8", "adafactor"])
def test_an_update_that_the_host_cancels_changes_nothing(kind: Optimizer) -> None:
    if kind != "adafactor":
        pytest.importorskip("torchao")
    torch.manual_seed(0)
    model = store_strategy(nn.Linear(64, 64), Strategy(kind="single"))
    optimizer = make_optimizer(model, kind, SETTINGS)
    set_gradients(model, 1)
    optimizer.step()

    def everything() -> list[torch.Tensor]:
        states = [v for state in optimizer.state.values() for v in state.values()]
        plain = [one.clone().float() for v in states for one in plain_tensors(v)]
        return [*(p.detach().clone() for p in model.parameters()), *plain]

    before = everything()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    cancel(optimizer, True)
    optimizer.step()
    for now, then in zip(everything(), before, strict=True):
        assert torch.equal(now, then)
    cancel(optimizer, False)
    set_gradients(model, 2)
    optimizer.step()
    assert not torch.equal(everything()[0], before[0])


def test_a_learning_rate_reaches_quantised_optimizers() -> None:
    pytest.importorskip("torchao")
    model = store_strategy(nn.Linear(64, 64), Strategy(kind="single"))
    optimizer = make_optimizer(model, "adamw-8bit", SETTINGS)
    set_learning_rate(optimizer, 0.0)
    before = [p.detach().clone() for p in model.parameters()]
    set_gradients(model, 1)
    optimizer.step()
    for now, then in zip(model.parameters(), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw"])
def test_a_cancelled_first_update_changes_nothing(
    kind: Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither parameters nor states, and the host does not read the flag."""
    model, optimizer = model_and_optimizer(kind)
    twin, expected = model_and_optimizer(kind)
    before = [p.detach().clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    cancel(optimizer, True)
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "item", lambda _: pytest.fail("the host read a tensor"))
        optimizer.step()
    for now, then in zip(model.parameters(), before, strict=True):
        assert torch.equal(now, then)
    # The next update is what a first one would have been.
    cancel(optimizer, False)
    for one in (model, twin):
        set_gradients(one, 1)
    optimizer.step()
    expected.step()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, other)
