"""Find the repeated blocks of a module by structure, not by name."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from torch import nn

from shardwise.spec.record import SpecError

# Least share of the largest class's parameters for another class to count as blocks too.
_COMPARABLE = 0.25


def find_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks by qualified name, in the order of the module.

    A block list is a ModuleList or Sequential of at least two members of one class that own
    parameters, or a ModuleList of a few classes, each of which comes several times (attention and
    state-space layers of a hybrid). If there are lists of several kinds, the blocks are those of
    the kind with the most parameters, and of others with at least a quarter as many (the encoder
    and the decoder of Whisper). Lists inside another list are not counted.
    """
    lists: dict[str, tuple[frozenset[type], dict[str, nn.Module]]] = {}
    for name, child in module.named_modules():
        if not isinstance(child, (nn.ModuleList, nn.Sequential)) or len(child) < 2:
            continue
        if any(name.startswith(f"{outer}.") for outer in lists):
            continue
        members = {f"{name}.{key}" if name else key: m for key, m in child.named_children()}
        classes = Counter(type(member) for member in members.values())
        repeats = isinstance(child, nn.ModuleList) and min(classes.values()) > 1
        if (len(classes) == 1 or repeats) and all(_size(member) for member in members.values()):
            lists[name] = (frozenset(classes), members)
    if not lists:
        raise SpecError(
            f"model: {type(module).__name__} has no list of repeated blocks (a ModuleList or "
            "Sequential of at least two members of one class); sharding it would gather the whole "
            "model at once"
        )
    weight: dict[frozenset[type], int] = {}
    for kind, members in lists.values():
        weight[kind] = weight.get(kind, 0) + sum(_size(member) for member in members.values())
    least = max(weight.values()) * _COMPARABLE
    return {
        name: member
        for kind, members in lists.values()
        if weight[kind] >= least
        for name, member in members.items()
    }


class RootParts(NamedTuple):
    """The modules of a root that is split: the embedding, and those that run after the blocks."""

    embedding: nn.Module
    head: list[nn.Module]


def root_parts(module: nn.Module, blocks: dict[str, nn.Module]) -> RootParts:
    """Embedding and head of a transformers causal LM.

    Raises SpecError if the module does not name them, or if they are tied.
    """
    embedding, head = (
        getattr(module, f"get_{side}_embeddings", lambda: None)() for side in ("input", "output")
    )
    if not isinstance(embedding, nn.Module) or not isinstance(head, nn.Module):
        raise SpecError(
            f"strategy.split_root: {type(module).__name__} does not tell its embedding and its "
            "head (get_input_embeddings, get_output_embeddings); leave split_root out"
        )
    if any(one is other for one in embedding.parameters() for other in head.parameters()):
        raise SpecError(
            f"strategy.split_root: embedding and head of {type(module).__name__} are tied, so "
            "they belong in one unit; leave split_root out"
        )
    container = next(iter(blocks)).rpartition(".")[0]
    owner = module.get_submodule(container.rpartition(".")[0])
    after = False
    norms = []
    for name, child in owner.named_children():
        if after and child is not head and any(True for _ in child.parameters()):
            norms.append(child)
        after = after or name == container.rpartition(".")[2]
    return RootParts(embedding, [*norms, head])


def parameter_names(module: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter by its id(); a tied parameter has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def owners(module: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, str]:
    """Map each parameter (by its first name) to the block that owns it, or '' for the root.

    A parameter that several units use, such as a tied embedding, belongs to the root.
    """
    prefixes = sorted(blocks, key=len, reverse=True)

    def owner(name: str) -> str:
        return next((block for block in prefixes if name.startswith(f"{block}.")), "")

    owner_of = {}
    for aliases in parameter_names(module).values():
        holders = {owner(name) for name in aliases}
        owner_of[aliases[0]] = holders.pop() if len(holders) == 1 else ""
    return owner_of


def _size(module: nn.Module) -> int:
    """The number of parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())
