"""How evenly tokens are spread over experts, against counts by hand and transformers' routers."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch

from shardwise.engine.materialize import Materializer
from shardwise.engine.routing_load import RoutingLoad, load_of
from tests.distributed.expert_models import EXPERTS, VOCAB, build


def test_the_least_even_block_counts() -> None:
    counts = torch.tensor([[6, 2, 4, 4], [4, 4, 4, 4]])
    found = load_of(counts, 2)
    assert found["expert_load"] == 6 / 4
    assert found["rank_load"] == 1.0
    shares = (6 / 16, 2 / 16, 4 / 16, 4 / 16)
    entropy = -sum(share * math.log(share) for share in shares) / math.log(4)
    assert found["routing_entropy"] == pytest.approx(entropy)
    assert load_of(torch.tensor([[3, 1, 0, 0]]), 2)["rank_load"] == 2.0
    least_even = load_of(torch.tensor([[2, 1, 1, 2], [1, 1, 3, 1]]), 2)
    assert least_even["rank_load"] == pytest.approx(4 / 3)
    assert least_even["busiest_rank"] == 1
    assert "rank_load" not in load_of(counts, 1)


def test_tokens_of_training_are_counted_and_others_not() -> None:
    module = build("mixtral")
    Materializer(module, torch.device("cpu"), torch.float64).unit([module])
    load = RoutingLoad.of(module)
    assert RoutingLoad.of(module) is load
    ids = torch.randint(0, VOCAB, (2, 16))
    with torch.no_grad():
        module(ids)
    assert load.take() == {}
    logits = module(ids, output_router_logits=True).router_logits
    chosen = [one.topk(2).indices.flatten().bincount(minlength=EXPERTS) for one in logits]
    assert load.take() == load_of(torch.stack(chosen), 1)
    assert load.nbytes == 2 * EXPERTS * 8
    assert RoutingLoad(torch.nn.Linear(2, 2)).take() == {}
