"""Expert parallelism: each process holds some of the experts, and tokens travel to them and back.

Stacked experts of transformers are divided along their first dimension among the processes of an
expert group. What a process holds is sharded by `fully_shard` over the processes that hold the same
experts, and its gradients are reduced among these and across replicas. No token is dropped.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardwise.engine.mesh import EXPERT, expert_mesh, sharding_mesh_of_experts
from shardwise.engine.routing import tokens_of_experts
from shardwise.engine.stored_experts import StoredExperts
from shardwise.pytorch.adapted import adapter_of
from shardwise.pytorch.private import (
    exchange_rows,
    local_tensor,
    silence_redistribution_advice,
    with_plain_parameters,
)
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from shardwise.units.division import stored_experts_problem
from shardwise.units.unit import shard_dimension

# Inputs of an experts module of transformers: tokens, the experts chosen for each, their weights.
INPUTS = 3


def stacked_experts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules that hold the weights of several experts in one tensor, with their names.

    Their own parameters have a row for each expert: matrices of three dimensions, and biases.
    Matrices that are stored quantised have two.
    """
    for name, part in module.named_modules():
        count = getattr(part, "num_experts", None)
        own = list(part.parameters(recurse=False))
        stored = isinstance(part.forward, StoredExperts)
        if isinstance(count, int) and (stored or any(p.ndim == 3 for p in own)):
            yield name, part


def is_divided_expert(parameter: torch.Tensor) -> bool:
    """Whether a parameter of a parallel model has experts of one expert group's part."""
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
    return EXPERT in (names or ())


def check_experts(model: nn.Module, strategy: Strategy) -> None:
    """Raise SpecError if the experts of `model` cannot be divided as the strategy says."""
    kind, degree, found = type(model).__name__, strategy.expert, dict(stacked_experts(model))
    adapter = adapter_of(model)
    if adapter is not None and adapter.quantises_experts:
        raise SpecError(stored_experts_problem(adapter.base))
    if not found:
        raise SpecError(
            f"strategy.expert: {kind} has no stacked experts as those of transformers; set it to 1"
        )
    for name, module in found.items():
        if ".base_layer" in name:
            raise SpecError(
                f"strategy.expert: {name.partition('.base_layer')[0]} has adapters, which are not "
                "divided; adapt other layers only, or set it to 1"
            )
        if len(inspect.signature(module.forward).parameters) != INPUTS:
            raise SpecError(
                f"strategy.expert: {name} of {kind} is not called with tokens, chosen experts and "
                "their weights; set it to 1"
            )
        count = cast(int, module.num_experts)
        rows = {len(parameter) for parameter in module.parameters()}
        if rows != {count} or count % degree:
            raise SpecError(
                f"strategy.expert: {degree} does not divide the {count} experts of {name}; choose "
                "a degree that does"
            )


class ExpertParallel:
    """Divides the experts of a model, unit by unit."""

    def __init__(self, model: nn.Module, strategy: Strategy, device_type: str) -> None:
        """Create the groups of processes; all processes must call it.

        Raises:
            SpecError: The model's experts cannot be divided.
        """
        check_experts(model, strategy)
        silence_redistribution_advice()
        self._degree, self._sharded = strategy.expert, strategy.mesh.states // strategy.expert
        self.mesh = expert_mesh(strategy, device_type)

    def unit(
        self, members: Sequence[nn.Module], reshard: bool | int | None, settings: dict[str, Any]
    ) -> list[FSDPModule]:
        """Divide the experts of a unit's modules; return them, each an FSDP unit of its own.

        `settings` are those of `fully_shard` for the unit.
        """
        made = []
        settings = {
            **settings,
            "mesh": sharding_mesh_of_experts(self.mesh),
            "shard_placement_fn": self._placement,
        }
        for member in members:
            # The root contains blocks, whose experts are divided already.
            whole = [m for _, m in stacked_experts(member) if not isinstance(m, FSDPModule)]
            for module in whole:
                self._divide(module)
                fully_shard(module, reshard_after_forward=reshard, **settings)
                sharded = cast(FSDPModule, module)
                # FSDP takes the mean over the processes with the same experts. Each of them has the
                # gradient for tokens of a whole expert group. A divide factor would say the same,
                # but torch 2.13 applies it twice in groups of one.
                sharded.set_all_reduce_hook(self._mean_over_tokens)
                made.append(sharded)
        return made

    def _divide(self, module: nn.Module) -> None:
        """Keep this process's experts of a module, and send tokens to where their experts are."""
        group = self.mesh[EXPERT]
        for name, whole in list(module.named_parameters(recurse=False)):
            # Every process has the same weights: nothing is sent.
            part = distribute_tensor(whole.data, group, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))
        module.forward = _Dispatch(module, group.get_group())

    def _placement(self, parameter: nn.Parameter) -> Shard:
        return Shard(shard_dimension(local_tensor(parameter).shape, self._sharded))

    def _mean_over_tokens(self, gradient: torch.Tensor) -> None:
        gradient.div_(self._degree)


class _Dispatch:
    """The forward of experts of which this process holds some."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._module, self._group, self._forward = module, group, module.forward
        self._count = cast(int, module.num_experts)
        module.num_experts = self._count // group.size()  # type: ignore[assignment]

    def __call__(
        self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum of the chosen experts' outputs for each token, (tokens, width).

        Args:
            tokens: Hidden states of this process's tokens, (tokens, width).
            chosen: The experts of each token, (tokens, experts per token).
            weights: Their weights, of the same shape.
        """
        each = chosen.shape[-1]
        by_expert = torch.argsort(chosen.flatten(), stable=True)
        counts = tokens_of_experts(chosen, self._count).view(self._group.size(), -1)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self._group)
        # The host waits for the device here, once in each forward.
        sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
        rows = exchange_rows(tokens[by_expert // each], received, sent, self._group)
        experts = torch.arange(counts.shape[1], device=rows.device).repeat(len(sent))
        experts = experts.repeat_interleave(arriving.flatten(), output_size=len(rows))
        back = exchange_rows(self._computed(rows, experts), sent, received, self._group)
        outputs = torch.empty_like(back)
        outputs[by_expert] = back
        weighted = outputs.view(*weights.shape, -1) * weights.unsqueeze(-1)
        return weighted.sum(1).to(tokens.dtype)

    def _computed(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """The output of this process's experts: row n is computed by expert `experts[n]`."""
        with with_plain_parameters(self._module):
            if len(rows):
                return self._run(rows, experts)
            # A process that got no tokens still takes part in the exchanges of the backward, and
            # reduces gradients of zeros.
            return self._run(rows.sum(0, keepdim=True), experts.new_zeros(1))[:0]

    def _run(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        computed: torch.Tensor = self._forward(
            rows, experts.unsqueeze(-1), torch.ones_like(rows[:, :1])
        )
        return computed
