"""How evenly routers spread tokens over experts and over the ranks that hold them, for metrics."""

from __future__ import annotations

import inspect
import math
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from shardwise.engine.expert import INPUTS, stacked_experts
from shardwise.engine.mesh import world
from shardwise.engine.routing import tokens_of_experts
from shardwise.engine.sync import is_parallel, strategy_of

_MARK = "_shardwise_routing"


class RoutingLoad:
    """Counts on the device how many tokens choose each expert, in every block that has experts."""

    def __init__(self, model: nn.Module) -> None:
        strategy = strategy_of(model) if is_parallel(model) else None
        self._degree = 1 if strategy is None else strategy.expert
        # Compiled blocks are left as they are.
        compiled = strategy is not None and strategy.compile
        self._counts: list[torch.Tensor] = []
        for _, module in [] if compiled else stacked_experts(model):
            if len(inspect.signature(module.forward).parameters) == INPUTS:
                module.register_forward_pre_hook(self._counting(len(self._counts)))
                experts = cast(int, module.num_experts) * self._degree
                self._counts.append(torch.zeros(experts, dtype=torch.int64))

    @classmethod
    def of(cls, model: nn.Module) -> RoutingLoad:
        """The load of a model, which counts from the first call on."""
        found: RoutingLoad | None = getattr(model, _MARK, None)
        if found is None:
            found = cls(model)
            object.__setattr__(model, _MARK, found)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the counts that ranks sum; 0 for a model without experts."""
        return sum(counts.nbytes for counts in self._counts)

    def _counting(self, number: int) -> Any:
        def count(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            # Recomputation counts again, which changes no share.
            if torch.is_grad_enabled() and len(inputs) == INPUTS:
                before = self._counts[number]
                added = tokens_of_experts(inputs[1], len(before))
                self._counts[number] = before.to(added.device) + added

        return count

    def take(self) -> dict[str, float]:
        """The load since the last call, of the worst block; all ranks must call this.

        `expert_load` is tokens of the busiest expert over their mean, `rank_load` the same of the
        ranks of expert groups, `busiest_rank` the number of that rank in its expert group,
        `routing_entropy` from 0 (one expert) to 1 (even).
        """
        if not self._counts:
            return {}
        counts = torch.stack([one.to(self._counts[-1].device) for one in self._counts])
        self._counts = [torch.zeros_like(one) for one in self._counts]
        if world()[1] > 1:
            dist.all_reduce(counts)
        return load_of(counts, self._degree)


def load_of(counts: torch.Tensor, degree: int) -> dict[str, float]:
    """The load from tokens by (block, expert), whose experts `degree` ranks divide."""
    if not counts.sum():
        return {}
    shares = counts.double() / counts.sum(1, keepdim=True).clamp(min=1)
    entropy = torch.special.entr(shares).sum(1) / math.log(max(2, shares.shape[1]))
    found = {
        "expert_load": float(shares.max() * shares.shape[1]),
        "routing_entropy": float(entropy.min()),
    }
    if degree > 1:
        ranks = shares.view(len(shares), degree, -1).sum(2)
        found["rank_load"] = float(ranks.max() * degree)
        found["busiest_rank"] = float(ranks.argmax() % degree)
    return found
