"""Units of any nn.Module, traced in one forward and backward on fake tensors.

Nothing is computed or allocated, so a module of any size can be traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution
from torch.func import functional_call

from shardwise.pytorch.build import build_module
from shardwise.pytorch.example_inputs import check_seq_len, example_inputs
from shardwise.pytorch.parts import Parts
from shardwise.pytorch.private import DataDependentOutputException, FakeTensorMode
from shardwise.pytorch.stacked import stacked_matrices
from shardwise.spec.dtype import TORCH_NAMES, DType
from shardwise.spec.lookup import Model
from shardwise.spec.record import SpecError
from shardwise.units.fused_attention import (
    Attention,
    fused_attention,
    has_fused_attention,
    own_attention,
)
from shardwise.units.recorder import ROOT, Recorder
from shardwise.units.repeated_blocks import repeated_blocks, skipping
from shardwise.units.unit import ModelUnits, Parameter, Unit, frozen

TORCH_DTYPES: dict[DType, torch.dtype] = {
    dtype: getattr(torch, name) for dtype, name in TORCH_NAMES.items()
}
# Batch sizes to trace with. At least two sequences: with one, broadcasting skips operations that a
# training run executes.
TRACED_BATCHES = (2, 3, 5, 7, 11, 13)


def traced_units(
    model: Model, seq_len: int, dtype: DType = "bf16", autocast: bool = False, casts: bool = True
) -> ModelUnits:
    """The units of a run's model, built on the meta device and traced."""
    with torch.device("meta"):
        module = build_module(model)
    return module_units(module, seq_len, dtype, autocast=autocast, casts=casts, name=model.name)


def module_units(
    module: nn.Module,
    seq_len: int,
    dtype: DType = "bf16",
    *,
    autocast: bool = False,
    casts: bool = True,
    inputs: Mapping[str, torch.Tensor] | tuple[torch.Tensor, ...] | None = None,
    name: str | None = None,
) -> ModelUnits:
    """Trace `module` at sequence length `seq_len`, in `dtype` or with `autocast` to that dtype.

    With `casts`, frozen weights of another dtype than the trained ones are also cast to `dtype`, as
    an all-gather does. Without it, as under DDP, they compute in their own dtype.

    `inputs` is an example of two samples. Default: the module's own `example_inputs(batch,
    seq_len)` if it has one, else token ids and labels as transformers models take.
    """
    check_seq_len(module, seq_len)
    batch = TRACED_BATCHES[0] if inputs is not None else _batch(module, seq_len)
    parts = Parts(module)
    skipped = repeated_blocks(module, parts.blocks)

    def recorded(attention: Attention) -> Recorder:
        """The recording of one batch, with `attention` in the place of the module's own."""
        kept = torch.float32 if autocast else TORCH_DTYPES[dtype]
        state = _fake_state(parts, kept, autocast, casts)
        example = _example(module, inputs, batch, seq_len, kept)
        recorder = Recorder(
            units=parts.owner,
            parameters={n: t for n, t in state.items() if n in parts.owner},
            tied=parts.tied_shapes,
            quantised=_quantised(parts),
        )
        recorder.drops_layers = any(hasattr(part, "layerdrop") for part in module.modules())
        casting = torch.autocast("cpu", dtype=TORCH_DTYPES[dtype], enabled=autocast)
        names = {id(block): n for n, block in parts.blocks.items() if n not in skipped}
        with ExitStack() as entered:
            entered.enter_context(_unvalidated_distributions())
            entered.enter_context(skipping(module, skipped))
            entered.enter_context(recorder.hooked(module, names))
            entered.enter_context(attention(module, recorder))
            entered.enter_context(recorder)
            entered.enter_context(casting)
            _run(module, state, example, recorder)
        return recorder

    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            recorder = recorded(fused_attention)
        except SpecError:
            # Some models read the mask that a fused kernel goes without.
            if not has_fused_attention(module):
                raise
            recorder = recorded(own_attention)
    named = name or type(module).__name__
    return _units(parts, recorder, skipped, batch * seq_len, seq_len, named, casts)


@contextmanager
def _unvalidated_distributions() -> Iterator[None]:
    """While entered, distributions do not check their arguments: without data there are none."""
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(__debug__)  # PyTorch's own default


def _batch(module: nn.Module, seq_len: int) -> int:
    """A batch size whose number of tokens is not a dimension of any parameter.

    Otherwise logits and the gradient of the head could have the same shape. The last of
    TRACED_BATCHES if none of them is free.
    """
    sizes = {size for parameter in module.parameters() for size in parameter.shape}
    free = [batch for batch in TRACED_BATCHES if batch * seq_len not in sizes]
    return free[0] if free else TRACED_BATCHES[-1]


def _run(
    module: nn.Module,
    state: dict[str, torch.Tensor],
    example: Mapping[str, torch.Tensor] | tuple[torch.Tensor, ...],
    recorder: Recorder,
) -> None:
    """Record a forward and backward, then a forward without saving; SpecError if they fail."""
    args, kwargs = ((), example) if isinstance(example, Mapping) else (example, {})
    try:
        # Only the loss is kept; other outputs are freed, as in a training loop.
        recorder.backward(_loss(functional_call(module, state, args, dict(kwargs))))
        with recorder.without_saving():
            functional_call(module, state, args, dict(kwargs))
    except DataDependentOutputException as error:
        raise SpecError(
            f"model: {type(module).__name__} reads the values of its tensors ({error.func}), so "
            "it cannot be traced without data"
        ) from None
    except SpecError:
        raise
    except Exception as error:
        raise SpecError(
            f"model: {type(module).__name__} does not run on its example inputs "
            f"({type(error).__name__}: {error}); {_remedy(state, str(error))}"
        ) from error


def _remedy(state: dict[str, torch.Tensor], message: str) -> str:
    """What to change where a module with these weights fails with this message of torch's."""
    narrow = any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in state.values())
    if narrow and ("expected scalar type" in message or "same dtype" in message):
        return "it mixes dtypes, as classes do that compute in fp32 alone: use --precision fp32"
    return "give it a method example_inputs(batch, seq_len)"


def _fake_state(
    parts: Parts, dtype: torch.dtype, autocast: bool, casts: bool
) -> dict[str, torch.Tensor]:
    """Fake tensors for all parameters and buffers by name; tied names share one tensor.

    Frozen parameters keep the dtype they are stored in under autocast. Without `casts`, frozen
    parameters of another dtype than the trained ones keep theirs too.
    """
    adapter, master = parts.adapter, parts.master_dtype
    made: dict[int, torch.Tensor] = {}
    state = {}
    for name, parameter in parts.parameters.items():
        if id(parameter) not in made:
            kind = dtype if parameter.is_floating_point() else parameter.dtype
            keeps = autocast or (not casts and parameter.dtype != master)
            if keeps and not parameter.requires_grad:
                kind = TORCH_DTYPES[adapter.float_dtype] if adapter else parameter.dtype
            fake = torch.empty(parameter.shape, dtype=kind, device="cpu")
            made[id(parameter)] = fake.requires_grad_(parameter.requires_grad)
        state[name] = made[id(parameter)]
    for name, buffer in parts.module.named_buffers(remove_duplicate=False):
        state[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
    return state


def _example(
    module: nn.Module,
    inputs: Mapping[str, torch.Tensor] | tuple[torch.Tensor, ...] | None,
    batch: int,
    seq_len: int,
    dtype: torch.dtype,
) -> Mapping[str, torch.Tensor] | tuple[torch.Tensor, ...]:
    """Empty tensors like `inputs`; if None, like the module's `example_inputs`.

    Floating-point tensors get `dtype`. Without `inputs` and `example_inputs`, token ids. Raises
    SpecError if the inputs are not tensors.
    """
    if inputs is None:
        offered = getattr(module, "example_inputs", None)
        if callable(offered):
            inputs = offered(batch, seq_len)
        else:
            return example_inputs(module, batch, seq_len, dtype)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        # A mixed-precision policy casts floating-point inputs too.
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        made = torch.empty(tensor.shape, dtype=kind, device="cpu")
        return made.requires_grad_(tensor.requires_grad)

    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    if not isinstance(inputs, (Mapping, tuple, list)) or not all(
        isinstance(value, torch.Tensor) for value in values
    ):
        raise SpecError("model: example_inputs must return tensors, in a tuple or by name")
    if isinstance(inputs, Mapping):
        return {key: fake(value) for key, value in inputs.items()}
    return tuple(fake(value) for value in inputs)


def _loss(output: Any) -> torch.Tensor:
    """The loss a module returns, or else the mean of its first output."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss", next(iter(output.values())))
    if loss is None:
        loss = output[0] if isinstance(output, (tuple, list)) else output
    if not isinstance(loss, torch.Tensor):
        raise SpecError(f"model: the module returned {type(output).__name__}, not a tensor or loss")
    return loss if loss.ndim == 0 else loss.float().mean()


def _units(
    parts: Parts,
    recorder: Recorder,
    skipped: Mapping[str, str],
    tokens: int,
    seq_len: int,
    name: str,
    casts: bool,
) -> ModelUnits:
    """The units from a recording of `tokens` tokens; equal blocks share one Unit.

    `skipped` names blocks that did not run, with the block that ran in their place.
    """
    used_late = recorder.used_after_blocks(parts.aliases)
    adapter, master = parts.adapter, parts.master_dtype
    matrices = _matrices(parts)

    def described(n: str, short: str) -> Parameter:
        tensor = parts.parameters[n]
        made = Parameter(name=short, shape=tuple(tensor.shape), after_blocks=n in used_late)
        if tensor.requires_grad:
            return made
        if adapter is not None:
            return frozen(made, adapter, n in matrices)
        if tensor.dtype == master:
            return made._replace(trainable=False)
        stored = float(tensor.element_size())
        return made._replace(trainable=False, stored=stored, uncast=not casts)

    def parameters(unit: str, shorten: Callable[[str], str]) -> tuple[Parameter, ...]:
        return tuple(
            described(n, shorten(n)) for n, holder in parts.owner.items() if holder == unit
        )

    # Equal blocks share one Unit, taken from the last block: the first one also saves tensors that
    # all blocks share, such as rotary tables.
    kinds: dict[object, Unit] = {}
    keys = []
    for block in parts.blocks:
        stage = recorder.stage(skipped.get(block, block), tokens)
        own = parameters(block, lambda n, block=block: n.removeprefix(f"{block}."))  # type: ignore[misc]
        flops = (stage.matmul_flops, stage.backward_matmul_flops, stage.attention_flops)
        keys.append((own, flops, stage.kernels))
        kinds[keys[-1]] = Unit(name="block", parameters=own, stage=stage)
    sequence = [kinds[key] for key in keys]
    root = Unit(
        name="root", parameters=parameters(ROOT, lambda n: n), stage=recorder.stage(ROOT, tokens)
    )
    before = [p for p in root.trained if not p.after_blocks]
    return ModelUnits(
        name=name,
        seq_len=seq_len,
        root=root,
        blocks=tuple(sequence),
        tied=bool(parts.tied_shapes),
        boundary_bytes=recorder.boundary_bytes / tokens,
        embedding_gradient_elements=sum(p.numel for p in before),
    )


def _quantised(parts: Parts) -> frozenset[str]:
    """Names of the weights that an adapter stores quantised."""
    if parts.adapter is None or not parts.adapter.quantised:
        return frozenset()
    most = 3 if parts.adapter.quantised_experts else 2
    return frozenset(n for n in _matrices(parts) if parts.parameters[n].ndim <= most)


def _matrices(parts: Parts) -> frozenset[str]:
    """Names of the frozen matrices of linear layers and experts in blocks.

    An adapter may quantise them.
    """
    if parts.adapter is None:
        return frozenset()

    def is_matrix(name: str) -> bool:
        path, _, key = name.rpartition(".")
        module = parts.module.get_submodule(path)
        linear = isinstance(module, nn.Linear) and parts.parameters[name].ndim == 2
        return linear or key in stacked_matrices(module)

    return frozenset(
        name
        for name, holder in parts.owner.items()
        if holder != ROOT and not parts.parameters[name].requires_grad and is_matrix(name)
    )
