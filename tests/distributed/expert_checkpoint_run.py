"""Save and load checkpoints of a mixture of experts under any strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwise.checkpoint.dcp.save import Saver
from shardwise.checkpoint.format.storage import find_storage
from shardwise.engine.loss import loss_of
from shardwise.engine.mesh import resolve_for_world
from shardwise.engine.parallelize import parallelize
from shardwise.engine.sync import micro_batch
from shardwise.spec.strategy import Strategy
from tests.distributed.checkpoint_run import Run
from tests.distributed.expert_models import VOCAB, build


class ExpertRun(Run):
    """gpt-oss, whose experts have biases, and its optimizer."""

    def __init__(self, strategy: Mapping[str, Any], seed: int) -> None:
        chosen = resolve_for_world(Strategy.read({"param_dtype": "fp32", **strategy}))
        module = build("gpt_oss")
        self.model = parallelize(module, chosen, device=torch.device("cpu"), seed=seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)

    def train(self) -> None:
        ids = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(0))
        with micro_batch(self.model):
            loss_of(self.model)(ids, ids).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def save_trained(case: dict[str, Any]) -> dict[str, str]:
    """Train a step and save it; digests of whole tensors."""
    run = ExpertRun(case["strategy"], seed=0)
    saver = Saver(find_storage(case["place"]), 0, False)
    run.train()
    run.save(saver, 1)
    saver.wait()
    return run.digests()


def load_and_save(case: dict[str, Any]) -> dict[str, Any]:
    """Load into a model with other values, and save what was loaded as the next step."""
    run = ExpertRun(case["strategy"], seed=1)
    found = run.load(case["place"])
    saver = Saver(find_storage(case["place"]), 0, case["background"])
    run.save(saver, case["step"])
    saver.wait()
    return found
