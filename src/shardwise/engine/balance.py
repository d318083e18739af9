"""The auxiliary loss of a mixture of experts, which keeps routers from preferring few experts.

It is that of Switch Transformers, as transformers computes it over all blocks: the number of
experts × the sum over experts of (share of tokens × mean probability). Shares have no gradient. So
with shares of all processes, the mean of what each computes is the loss of the global micro-batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.engine.mesh import world
from shardwise.engine.routing import tokens_of_experts
from shardwise.spec.record import SpecError
from shardwise.spec.train import BalanceLoss

# The setting of transformers with which a model returns the logits of its routers.
_ASKED = "output_router_logits"


class Balance:
    """The auxiliary loss of one model."""

    def __init__(self, model: nn.Module, kind: BalanceLoss) -> None:
        """Read the coefficient and the experts per token from the model's configuration.

        Raises:
            SpecError: The model has no auxiliary loss.
        """
        config: Any = getattr(model, "config", None)
        coefficient = getattr(config, "router_aux_loss_coef", None)
        if coefficient is None or _ASKED not in inspect.signature(type(model).forward).parameters:
            raise SpecError(
                f"train.balance_loss: {type(model).__name__} has no auxiliary loss for its "
                'routers; set it to "none"'
            )
        self._coefficient, self._each = float(coefficient), int(config.num_experts_per_tok)
        # Keywords of a forward whose output has the logits of routers.
        self.settings = {_ASKED: True}
        self._over_all = kind == "global" and world()[1] > 1

    def of(self, output: Any, tokens: torch.Tensor) -> torch.Tensor:
        """The loss to add to a sum over `tokens` tokens: its coefficient × loss × tokens."""
        loss = balance_loss(output.router_logits, self._each, over_all=self._over_all)
        return self._coefficient * tokens * loss


def counted_bytes(model: nn.Module) -> int:
    """Bytes of the counts of tokens that ranks sum in each micro-batch: an integer per expert."""
    config: Any = model.config
    experts: int = getattr(config, "num_local_experts", None) or config.num_experts
    return torch.int64.itemsize * experts


def balance_loss(logits: Sequence[torch.Tensor], each: int, *, over_all: bool) -> torch.Tensor:
    """The loss from the logits of every router, (tokens, experts).

    Args:
        logits: Logits of each block's router.
        each: Experts per token.
        over_all: Take the shares of tokens from all processes, each with equally many tokens.
    """
    experts = logits[0].shape[-1]
    counts = torch.zeros(experts, dtype=torch.int64, device=logits[0].device)
    means = []
    for block in logits:
        exact = block if block.dtype == torch.float64 else block.float()
        probabilities = exact.softmax(-1)
        counts += tokens_of_experts(probabilities.topk(each).indices, experts)
        means.append(probabilities.mean(0))
    if over_all:
        dist.all_reduce(counts)
    mean = torch.stack(means).mean(0)
    shares = counts.to(mean.dtype) * (each / counts.sum())
    return experts * (shares * mean).sum()
