"""The auxiliary loss of routers, against transformers' own."""

from __future__ import annotations

import pytest

from shardwise.spec.record import SpecError

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch

from shardwise.engine.balance import Balance
from shardwise.engine.loss import loss_of
from shardwise.engine.materialize import Materializer
from tests.distributed.expert_models import VOCAB, build


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe", "gpt_oss"])
def test_the_loss_is_that_of_the_model(family: str) -> None:
    module = build(family, router_aux_loss_coef=0.3)
    Materializer(module, torch.device("cpu"), torch.float64).unit([module])
    ids, targets = torch.randint(0, VOCAB, (2, 3, 16), generator=torch.Generator().manual_seed(0))
    own = module(input_ids=ids, output_router_logits=True).aux_loss
    added = loss_of(module, "local")(ids, targets) - loss_of(module)(ids, targets)
    assert float(added.detach()) == pytest.approx(0.3 * ids.numel() * float(own.detach()), rel=1e-6)
    added.backward()
    routers = [
        p for n, p in module.named_parameters() if n.endswith((".gate.weight", "router.weight"))
    ]
    assert all(float(p.grad.norm()) > 0 for p in routers if p.grad is not None)
    assert len(routers) == sum(p.grad is not None for p in routers) == 2


def test_models_without_such_a_loss_are_refused() -> None:
    with pytest.raises(SpecError, match=r"train\.balance_loss"):
        Balance(build("deepseek_v3"), "global")
