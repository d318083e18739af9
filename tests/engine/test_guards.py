"""What parallelize refuses, each with a sentence, before the engine would fail or say nothing."""

from __future__ import annotations

import pytest

from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from tests.units.reduced import build, reduced

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from shardwise.engine.parallelize import check_optimizer, parallelize  # noqa: E402

SINGLE = Strategy(kind="single", param_dtype="fp32")


def small() -> nn.Module:
    return build(
        reduced("llama", hidden=32, heads=2, kv_heads=1, head_dim=16, ffn=48), device="cpu"
    )


def test_an_optimizer_made_before_sharding() -> None:
    model = parallelize(small(), SINGLE)
    check_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(SpecError, match=r"^optimizer: .*after parallelize"):
        check_optimizer(torch.optim.SGD(small().parameters(), lr=0.1), model)


def up_projection(model: nn.Module, block: int) -> nn.Linear:
    found = model.get_submodule(f"model.layers.{block}.mlp.up_proj")
    assert isinstance(found, nn.Linear)
    return found


def test_two_dtypes_in_one_unit() -> None:
    model = small()
    up_projection(model, 1).to(torch.bfloat16)
    with pytest.raises(SpecError, match=r"unit 'model.layers.1' mixes dtypes .*up_proj"):
        parallelize(model, SINGLE)


def test_a_weight_tied_across_blocks() -> None:
    model = small()
    up_projection(model, 2).weight = up_projection(model, 0).weight
    with pytest.raises(
        SpecError, match="layers.0.mlp.up_proj.weight and model.layers.2.mlp.up_proj.weight"
    ):
        parallelize(model, SINGLE)


def test_a_tied_head_is_fine() -> None:
    tied = build(reduced("gpt2", hidden=32, heads=2, kv_heads=2, head_dim=16, ffn=64), device="cpu")
    assert parallelize(tied, SINGLE) is tied


def test_a_module_without_blocks() -> None:
    with pytest.raises(SpecError, match="no list of repeated blocks"):
        parallelize(nn.Linear(4, 4), SINGLE)


def test_more_processes_than_are_running() -> None:
    with pytest.raises(SpecError, match="groups of 2 do not divide 1 device; use 1"):
        parallelize(small(), Strategy(kind="zero3", shard=2))


@pytest.mark.parametrize("recompute", ["selective", "full", 0.5])
def test_recomputation_changes_no_gradient(recompute: str | float) -> None:
    ids = torch.randint(0, 1000, (2, 16))
    gradients = []
    for policy in ("none", recompute):
        torch.manual_seed(0)
        exact = SINGLE.but(recompute=policy, master_dtype="fp64", param_dtype="fp64")
        model = parallelize(small().double(), exact)
        names = [name for name, _ in model.named_parameters()]
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
        assert "model.layers.0.mlp.up_proj.weight" in names
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)
