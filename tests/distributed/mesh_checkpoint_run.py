"""Save and load checkpoints of a transformers model on any mesh."""

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
from shardwise.spec.model import ModelSpec
from shardwise.spec.strategy import Strategy
from tests.distributed.checkpoint_run import Run
from tests.units.reduced import build, reduced

# Four kv heads for tensor 4; neither 2 nor 4 processes divide the vocabulary, nor what they leave.
SPEC = reduced(
    "llama", layers=2, hidden=24, heads=4, kv_heads=4, head_dim=6, ffn=36, vocab=101, tied=True
)


class CausalRun(Run):
    """A causal LM that trains under a strategy, and its optimizer."""

    def __init__(self, strategy: Mapping[str, Any], seed: int, spec: ModelSpec = SPEC) -> None:
        torch.manual_seed(seed)
        chosen = Strategy.model_validate({"param_dtype": "fp32", **strategy})
        module = build(spec, device="cpu", attention="sdpa")
        self.model = parallelize(module, resolve_for_world(chosen))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)

    def train(self) -> None:
        ids = torch.randint(0, SPEC.vocab, (2, 8), generator=torch.Generator().manual_seed(0))
        with micro_batch(self.model):
            loss_of(self.model)(ids, ids).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def save_trained(case: dict[str, Any]) -> dict[str, str]:
    """Train a step and save it; digests of whole tensors."""
    run = CausalRun(case["strategy"], seed=0)
    saver = Saver(find_storage(case["place"]), 0, False)
    run.train()
    run.save(saver, 1)
    saver.wait()
    return run.digests()


def load_and_save(case: dict[str, Any]) -> dict[str, Any]:
    """Load into a model with other values, and save what was loaded as the next step."""
    run = CausalRun(case["strategy"], seed=1)
    found = run.load(case["place"])
    saver = Saver(find_storage(case["place"]), 0, case["background"])
    run.save(saver, case["step"])
    saver.wait()
    return found
