"""Checks of a mixture of experts that the user's own code shards, on a few CPU processes.

Experts are often reduced over other groups of processes than all other parameters, and mistakes
there are silent: the loss falls, more slowly. So the gradients of every parameter are compared with
those of one process that has the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.engine.expert import stacked_experts
from shardwise.engine.loss import loss_of
from shardwise.engine.mesh import world
from shardwise.engine.sync import is_parallel, micro_batch
from shardwise.pytorch.build import build_module, find_function, with_exact_experts
from shardwise.pytorch.private import WRAPPER_PREFIXES
from shardwise.spec.lookup import Model
from shardwise.spec.record import SpecError
from shardwise.trainer.clip import clip_gradients
from shardwise.trainer.start import vocabulary
from shardwise.trials.doctor.check import Check

# Processes of these checks: two replicas of two devices, or any other product.
PROCESSES = 4
_SEQUENCES, _SEQ_LEN = 8, 32
# Models compute parts in fp32 whatever their dtype. Mistakes are factors.
_TOLERANCE = 1e-4
# Stacked experts with a larger share of all parameters are what adapters are for.
_MOST = 0.5

Gradients = dict[str, torch.Tensor]
Norm = Callable[[Iterable[nn.Parameter]], Any]


def expert_checks(model: Model, sharding: str) -> list[Check]:
    """Run the checks on the current processes, which are in a process group.

    Args:
        model: The model of the run.
        sharding: `package.module:function`, which shards a module on the current processes and
            returns it, or the pair of it and a function from parameters to the gradient norm.

    Raises:
        SpecError: The function cannot be imported, or the model has no stacked experts.
    """
    alone, given = _built(model), _built(model)
    parts = _Parts.of(alone)
    made = find_function(sharding, "--sharding")(given)
    parallel, norm = made if isinstance(made, tuple) else (made, clip_gradients)
    vocab = vocabulary(model, alone) or 256
    ids = torch.randint(
        0, vocab, (_SEQUENCES, _SEQ_LEN + 1), generator=torch.Generator().manual_seed(0)
    )
    expected = _gradients(alone, ids)
    found = _gradients(parallel, ids.chunk(world()[1])[world()[0]])
    others = [name for name in expected if name not in parts.experts]
    return [
        _routers(alone, parts, expected),
        *_adapters(alone, parts),
        _equal_on_all_ranks(found, expected),
        _as_one_process("gradients of experts", parts.experts, found, expected),
        _as_one_process("other gradients", others, found, expected),
        _norm(norm, parallel, found),
    ]


class _Parts(NamedTuple):
    """The names of the parameters of stacked experts, of routers, and of modules of experts."""

    experts: list[str]
    routers: list[str]
    modules: list[str]

    @classmethod
    def of(cls, module: nn.Module) -> _Parts:
        """The parts of a module; raises SpecError without stacked experts."""
        counts = {name: part.num_experts for name, part in stacked_experts(module)}
        if not counts:
            raise SpecError(
                f"model: {type(module).__name__} has no stacked experts: modules with num_experts "
                "and one tensor of three dimensions for all of them"
            )
        experts, routers = [], []
        for name, parameter in module.named_parameters():
            if any(name.startswith(f"{owner}.") for owner in counts):
                experts.append(name)
                continue
            # A router is a matrix with a row for each expert, beside them.
            near = {owner.removesuffix(".base_layer").rpartition(".")[0]: n
                    for owner, n in counts.items()}  # fmt: skip
            if parameter.ndim == 2 and any(
                name.startswith(f"{block}.") and len(parameter) == n for block, n in near.items()
            ):
                routers.append(name)
        return cls(experts, routers, list(counts))


def _built(model: Model) -> nn.Module:
    """The module in fp64, with the same weights on every process and whenever it is built."""
    torch.manual_seed(0)
    return with_exact_experts(build_module(model).double())


def _gradients(module: nn.Module, ids: torch.Tensor) -> Gradients:
    """The whole gradient of every trained parameter by name, of the mean loss over `ids`."""
    inputs, targets = ids[:, :-1], ids[:, 1:]
    with micro_batch(module) if is_parallel(module) else torch.enable_grad():
        loss = loss_of(module)(inputs, targets) / targets.numel()
        loss.backward()  # type: ignore[no-untyped-call]
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            # Ranks without a gradient still take part in gathering it.
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[_plain(name)] = own.full_tensor() if isinstance(own, DTensor) else own
    return found


def _plain(name: str) -> str:
    """The name of a parameter without what wrappers add."""
    for prefix in (*WRAPPER_PREFIXES, "module."):
        name = name.replace(prefix, "") if prefix in WRAPPER_PREFIXES else name.removeprefix(prefix)
    return name


def _routers(module: nn.Module, parts: _Parts, expected: Gradients) -> Check:
    """Check that routers are trained where experts are, and that a gradient reaches them."""
    name = "routers are trained"
    if not any(expert in expected for expert in parts.experts):
        return Check(name, None, "the experts are frozen")
    if not parts.routers:
        return Check(name, None, "no matrix beside the experts has a row for each of them")
    frozen = [router for router in parts.routers if router not in expected]
    silent = [r for r in parts.routers if r in expected and not expected[r].abs().max()]
    if frozen:
        detail = f"{frozen[0]} is frozen while experts are trained; set its requires_grad to True"
        return Check(name, False, detail)
    if silent:
        detail = (
            f"{silent[0]} gets no gradient: multiply the experts' outputs by weights that the "
            "router computes with gradients"
        )
        return Check(name, False, detail)
    return Check(name, True, f"all {len(parts.routers)} routers get gradients")


def _adapters(module: nn.Module, parts: _Parts) -> Iterator[Check]:
    """Check that adapters reach stacked experts; nothing for a model without adapters."""
    names = [name for name, _ in module.named_parameters()]
    adapted = [name for name in names if ".lora_" in name]
    if not adapted:
        return
    name = "adapters reach experts"
    owners = [owner.removesuffix(".base_layer") for owner in parts.modules]
    missed = [o for o in owners if not any(a.startswith(f"{o}.") for a in adapted)]
    sizes = {n: p.numel() for n, p in module.named_parameters()}
    share = sum(sizes[n] for n in parts.experts) / sum(sizes.values())
    if missed and share > _MOST:
        yield Check(
            name,
            False,
            f"{missed[0]} has no adapter, and stacked experts are {share:.0%} of all parameters: "
            "name them in target_parameters of peft's LoraConfig, as they are no linear layers",
        )
        return
    yield Check(name, True, f"adapters in {len(owners) - len(missed)} of {len(owners)} mixtures")


def _equal_on_all_ranks(found: Gradients, expected: Gradients) -> Check:
    """Check that all processes have the same whole gradients, so that replicas stay equal."""
    name = "gradients equal on all ranks"
    seen = torch.stack([
        torch.stack([g.norm(), (g.flatten() * _pattern(g)).sum()]) for g in found.values()
    ])  # fmt: skip
    least, most = seen.clone(), seen.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    differs = ((most - least) > _TOLERANCE * most[:, :1]).any(1).tolist()
    unlike = [n for n, differ in zip(found, differs, strict=True) if differ]
    if not unlike:
        return Check(name, True, f"{len(found)} tensors")
    return Check(
        name,
        False,
        f"{unlike[0]} and {len(unlike) - 1} more differ between ranks, so replicas drift apart: "
        "reduce them across replicas too, such as by a mesh with an axis for these",
    )


def _pattern(tensor: torch.Tensor) -> torch.Tensor:
    """Fixed numbers of both signs, as many as the tensor has."""
    return torch.arange(tensor.numel(), dtype=tensor.dtype).mul(12.9898).sin()


def _as_one_process(
    name: str, chosen: Iterable[str], found: Gradients, expected: Gradients
) -> Check:
    """Check that gradients equal those of one process; a common factor is named."""
    name, wrong = f"{name} as of one process", dict[str, float]()
    largest = max(float(g.norm()) for g in expected.values())
    exact, trained = True, [n for n in chosen if n in expected]
    for one in trained:
        own, whole = found.get(one), expected[one]
        if own is None or own.shape != whole.shape:
            return Check(name, False, f"{one} has no gradient of shape {tuple(whole.shape)}")
        scale = float(whole.norm())
        if float((own - whole).norm()) <= _TOLERANCE * max(scale, _TOLERANCE * largest):
            continue
        wrong[one] = float((own * whole).sum()) / max(scale**2, 1e-300)
        exact &= float((own - wrong[one] * whole).norm()) <= _TOLERANCE * scale
    if not wrong:
        return Check(name, True, f"{len(trained)} tensors")
    first, factor = next(iter(wrong.items()))
    if exact and max(wrong.values()) - min(wrong.values()) <= _TOLERANCE * abs(factor):
        detail = (
            f"{len(wrong)} of {len(trained)} are {factor:.4g} times those of one process, such as "
            f"{first}: they are divided by a wrong number. torch divides twice if a divide factor "
            "is set for a group of one device"
        )
        return Check(name, False, detail)
    detail = f"{len(wrong)} of {len(trained)} differ, such as {first}: reduce them over all tokens"
    return Check(name, False, detail)


def _norm(norm: Norm, parallel: nn.Module, found: Gradients) -> Check:
    """Check that the gradient norm, by which gradients are clipped, is that of all of them."""
    name = "gradient norm"
    measured = norm(parallel.parameters())
    measured = measured.full_tensor() if isinstance(measured, DTensor) else measured
    whole = float(torch.stack([g.norm() for g in found.values()]).norm())
    if abs(float(measured) - whole) <= _TOLERANCE * whole:
        return Check(name, True, f"{whole:.6g}, that of all gradients")
    return Check(
        name,
        False,
        f"{float(measured):.6g}, but that of all gradients is {whole:.6g}, so clipping differs: "
        "take one norm for each mesh, and then the norm of these",
    )
