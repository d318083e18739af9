"""Tensor parallelism: torch's parallel styles, applied as a model's own plan says.

The plan is a table from patterns of module names to styles in the terms of transformers, such as
`"model.layers.*.mlp.up_proj": "colwise"`. Models of transformers have a plan as `tp_plan`; a user's
module can have an attribute of that name.

Column-wise layers shard their output among the processes, row-wise layers their input: between
them no process communicates. The module around a group of column-wise layers gathers its input
once for all of them. With sequence parallelism, activations between such modules (norms, residuals)
are sharded along the sequence. Embedding, head and loss are sharded by vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardwise.engine.sequence import use_full_sequences
from shardwise.pytorch.adapted import adapter_of
from shardwise.pytorch.private import silence_redistribution_advice
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from shardwise.units.module import TORCH_DTYPES

COLWISE, ROWWISE, PER_HEAD = "colwise", "rowwise", "replicated_with_grad_allreduce"
# Styles of the embedding and of the head, and synonyms.
EMBEDDING, HEAD = "embedding_rowwise", "colwise_gather_output"
_SYNONYMS = {"colwise_rep": HEAD}
_STYLES = (COLWISE, ROWWISE, PER_HEAD, EMBEDDING, HEAD)
_SEQUENCE, _HEADS, _LAST = 1, 2, 2


class TensorParallel:
    """Shards the layers of a model among the processes of a mesh with one axis.

    Units are sharded one after the other, each before `fully_shard` is applied to it.

    Raises:
        SpecError: The model has no plan, or cannot be sharded over this number of processes.
    """

    def __init__(self, model: nn.Module, strategy: Strategy, mesh: DeviceMesh) -> None:
        self._model, self._mesh = model, mesh
        _check_reshard(strategy)
        self._between: Placement = Shard(_SEQUENCE) if strategy.sequence_parallel else Replicate()
        self._sequence_parallel = strategy.sequence_parallel
        self._styles = divided_modules(model, strategy.tensor)
        self._prepared = _parents_of_column_layers(self._styles)
        self._names = {id(module): name for name, module in model.named_modules()}
        self._done: set[str] = set()
        silence_redistribution_advice()
        if strategy.sequence_parallel:
            use_full_sequences(model, strategy.tensor, TORCH_DTYPES[strategy.param_dtype])

    def unit(self, members: Sequence[nn.Module]) -> None:
        """Shard the layers of `members` that are not sharded yet. Nothing is communicated."""
        tied = _tied_parameters(self._model)
        for member in members:
            for module in member.modules():
                name = self._names[id(module)]
                if name not in self._done and not _is_meta(module):
                    self._done.add(name)
                    self._divide(name, module)
        for first, others in tied:
            for owner, key in others:
                setattr(owner, key, getattr(*first))

    def _divide(self, name: str, module: nn.Module) -> None:
        """Apply the parallel style of one module, and keep frozen parameters frozen."""
        if name in self._prepared:
            self._prepare(module)
        style = self._style(name, module)
        if style is not None:
            frozen = [key for key, p in module.named_parameters() if not p.requires_grad]
            # Every process has the same weights already and keeps its own part of them.
            parallelize_module(module, self._mesh, style, src_data_rank=None)
            for key in frozen:
                module.get_parameter(key).requires_grad_(False)

    def _style(self, name: str, module: nn.Module) -> ParallelStyle | None:
        """torch's style for a module; None if it needs none."""
        style, between = self._styles.get(name), self._between
        found: ParallelStyle | None = None
        if style == COLWISE:
            whole = name.rpartition(".")[0] in self._prepared
            found = ColwiseParallel(input_layouts=Replicate() if whole else between)
        elif style == ROWWISE:
            found = RowwiseParallel(output_layouts=between)
        elif style == EMBEDDING:
            found = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
        elif style == HEAD:
            # Logits stay sharded: the loss is computed on the shards.
            found = ColwiseParallel(
                input_layouts=between, output_layouts=Shard(_LAST), use_local_output=False
            )
        elif style == PER_HEAD:
            found = SequenceParallel(sequence_dim=_HEADS, use_local_output=True)
        elif self._sequence_parallel and any(True for _ in module.parameters(recurse=False)):
            found = SequenceParallel(sequence_dim=_SEQUENCE, use_local_output=True)
        return found

    def _prepare(self, module: nn.Module) -> None:
        """Make a module gather its input as one tensor that all its layers share.

        The gradients of that tensor are then summed before one reduction, instead of one per layer.
        """

        def whole(hidden: torch.Tensor) -> torch.Tensor:
            """The full hidden states, gathered if they are sharded along the sequence."""
            part = DTensor.from_local(hidden, self._mesh, [self._between], run_check=False)
            return cast(torch.Tensor, part.redistribute(placements=[Replicate()]))

        def prepare(_: nn.Module, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
            if "hidden_states" in settings:
                return args, {**settings, "hidden_states": whole(settings["hidden_states"])}
            return (whole(args[0]), *args[1:]), settings

        module.register_forward_pre_hook(prepare, with_kwargs=True)


def _check_reshard(strategy: Strategy) -> None:
    """Raise SpecError for an integer `reshard_after_forward`."""
    # FSDP2 of torch 2.13 creates groups for this process's tensor rank only, and hangs.
    if type(strategy.reshard_after_forward) is int:
        raise SpecError(
            "strategy.reshard_after_forward: a number does not work with tensor parallelism; use "
            "true or false"
        )


def divided_modules(model: nn.Module, tensor: int) -> dict[str, str]:
    """The style of each module that tensor parallelism of degree `tensor` shards, by module name.

    Raises:
        SpecError: The result would be wrong, or torch would fail late.
    """
    styles = _styles_by_name(model)
    problems = [*_unsupported(model, styles), *_indivisible_problems(model, styles, tensor)]
    if problems:
        raise SpecError(f"strategy.tensor: {problems[0]}")
    return styles


def _parents_of_column_layers(styles: Mapping[str, str]) -> set[str]:
    """The names of the modules that contain column-wise layers."""
    return {name.rpartition(".")[0] for name, style in styles.items() if style == COLWISE}


def _styles_by_name(model: nn.Module) -> dict[str, str]:
    """The style of each module that the plan matches, by module name."""
    plan: Mapping[str, str] | None = getattr(model, "tp_plan", None)
    if not plan:
        raise SpecError(
            f"strategy.tensor: {type(model).__name__} has no plan for tensor parallelism (an "
            "attribute tp_plan); set tensor to 1"
        )
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    styles = {}
    for name, module in model.named_modules():
        found = [style for pattern, style in plan.items() if fnmatchcase(name, pattern)]
        if found:
            styles[name] = _SYNONYMS.get(found[0], found[0])
        elif module is embedding:
            # The plan of some models omits the embedding.
            styles[name] = EMBEDDING
    return styles


def _unsupported(model: nn.Module, styles: Mapping[str, str]) -> Iterator[str]:
    """Sentences about styles and modules that cannot be sharded, or that the plan omits."""
    what, prepared = type(model).__name__, _parents_of_column_layers(styles)
    if adapter_of(model) is not None:
        yield "adapters cannot be trained with tensor parallelism; set tensor to 1"
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for name, style in styles.items():
        module = model.get_submodule(name)
        if style not in _STYLES or (style == HEAD and head not in (None, module)):
            yield f"the plan of {what} divides {name} by {style!r}, which is not supported"
        elif style != PER_HEAD and not isinstance(module, (nn.Linear, nn.Embedding)):
            yield f"{name} is a {type(module).__name__}, which cannot be divided"
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        inside = any(name.startswith(f"{parent}.") for parent in prepared)
        if own and name not in styles and (inside or any(p.ndim > 1 for p in own)):
            yield f"the plan of {what} leaves out {name}"


def _indivisible_problems(
    model: nn.Module, styles: Mapping[str, str], tensor: int
) -> Iterator[str]:
    """Sentences about heads and layer widths that the degree does not divide."""
    config = getattr(model, "config", None)
    if config is not None:
        config = config.get_text_config()
        heads = getattr(config, "num_attention_heads", tensor)
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        if heads % tensor:
            yield f"{tensor} does not divide the {heads} attention heads"
        if kv_heads % tensor:
            yield f"{tensor} does not divide the {kv_heads} kv heads; tensor must divide them"
    for name, style in styles.items():
        module = model.get_submodule(name)
        if isinstance(module, nn.Linear) and style in (COLWISE, ROWWISE):
            size = module.out_features if style == COLWISE else module.in_features
            if size % tensor:
                yield f"{tensor} does not divide the width {size} of {name}"


def _is_meta(module: nn.Module) -> bool:
    """Whether any parameter of the module itself is on the meta device."""
    return any(p.is_meta for p in module.parameters(recurse=False))


ParameterRef = tuple[nn.Module, str]


def _tied_parameters(model: nn.Module) -> list[tuple[ParameterRef, list[ParameterRef]]]:
    """(first place, other places) of each tied parameter; a place is (module, parameter name)."""
    places: dict[int, list[ParameterRef]] = {}
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((module, key))
    return [(found[0], found[1:]) for found in places.values() if len(found) > 1]
