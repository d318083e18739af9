"""Record FLOPs, saved bytes and live memory of a forward and a backward, per block.

Module hooks tell which block runs, autograd's saved-tensor hooks tell what is saved for the
backward, and a dispatch mode sees the FLOPs of every operation and the storages it allocates.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwise.pytorch.dispatch import DispatchMode, tensors_in
from shardwise.pytorch.operations import (
    Elementwise,
    flops_of,
    is_view,
    storage_key,
    storage_size,
    touched_bytes,
)
from shardwise.pytorch.private import (
    ATTENTION,
    CAST,
    GROUPED_MATMUL,
    SCALAR,
    tree_leaves,
)
from shardwise.units.recorded import Record
from shardwise.units.stage import Moment, Stage
from shardwise.units.unit import dequantising_bytes

ROOT = ""


class Recorder(DispatchMode):
    """Records one forward and backward.

    Enter it around the forward, call `backward` with the loss, then read the stages.
    """

    def __init__(
        self,
        units: dict[str, str],
        parameters: dict[str, torch.Tensor],
        tied: set[tuple[int, ...]],
        quantised: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self._tied_shapes = tied | {shape[::-1] for shape in tied}
        self.unit_of = units
        self.parameters = parameters
        self._quantised = {storage_key(parameters[name]): name for name in quantised}
        self.records: dict[str, Record] = {}
        self.order: list[str] = []
        self.unit = ROOT
        self.in_backward = False
        self.saves_nothing = False
        self.boundary_bytes = 0.0
        # Tokens that a query of the running attention sees at most; None for all.
        self.window: int | None = None
        # Whether the model draws a random number per layer and skips the layer below a threshold.
        self.drops_layers = False
        self._logit_shape = (-1, -1)
        self._first_use: dict[str, bool] = {}
        self._fixed = {storage_key(t) for t in parameters.values()}
        self._live: dict[int, tuple[int, bool]] = {}
        # Storages are numbered from 1, because their keys are reused after they are freed.
        self._numbers: dict[int, int] = {}
        self._storages = 0
        self._saved_numbers: set[int] = set()
        self._live_bytes = [0.0, 0.0]
        self._gradients: set[int] = set()
        self._gradient_elements: dict[str, float] = {}
        self._saved: set[int] = set()
        self._below: dict[str, float] = {}
        self._root_saved_before = 0.0
        # Bytes saved by the embedding and the blocks so far, without the running block.
        self._saved_before = 0.0
        self._references: dict[int, weakref.ref[Any]] = {}

    # ---- module and autograd hooks ----------------------------------------------------------

    @contextmanager
    def hooked(self, module: nn.Module, blocks: dict[int, str]) -> Iterator[None]:
        """Track which block runs, and which root parameters are used after the blocks."""
        handles: list[Any] = []
        for name, child in module.named_modules():
            block = blocks.get(id(child))
            if block is not None:
                handles.append(
                    child.register_forward_pre_hook(self._enter(block), with_kwargs=True)
                )
                handles.append(child.register_forward_hook(self._leave(block), always_call=True))
            handles.append(child.register_forward_pre_hook(self._record_first_use(name)))
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                handles.append(
                    parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                        self._record_gradient(name)
                    )
                )
        saving = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        try:
            with saving:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward and record its memory per block."""
        running = 0.0
        for block in self.order:
            self._below[block] = running + self._root_saved_before
            running += self._record_of(block).saved_bytes
        self._below[ROOT] = running + self._root_saved_before
        self.in_backward, self.unit = True, ROOT
        loss.backward()  # type: ignore[no-untyped-call]

    @contextmanager
    def without_saving(self) -> Iterator[None]:
        """Record a second forward in which autograd saves nothing; call it after `backward`."""
        self.in_backward, self.saves_nothing, self.unit = False, True, ROOT
        with torch.no_grad():
            yield

    def _enter(self, block: str) -> Callable[..., None]:
        """A forward pre-hook that makes `block` the running unit and records its input bytes."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.in_backward:
                return
            if self.saves_nothing:
                self.unit = block
                self._saved_before = self._live_bytes[0] - self._record_of(block).input_bytes
                return
            if not self.order:
                self._root_saved_before = self._record_of(ROOT).saved_bytes
                self._record_of(ROOT).saved_bytes = 0.0
                self._saved_before = self._root_saved_before
            self.order.append(block)
            self.unit = block
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            inputs = [t for t in tensors if t.requires_grad]
            self._record_of(block).input_bytes = float(
                sum({storage_key(t): storage_size(t) for t in inputs}.values())
            )
            self.boundary_bytes = self._record_of(block).input_bytes
            if inputs and inputs[0].grad_fn is not None and len(self.order) == 1:
                inputs[0].grad_fn.register_prehook(lambda *_: self._switch("<embedding>"))

        return hook

    def _leave(self, block: str) -> Callable[..., None]:
        """A forward hook that ends `block`, and lets its backward make it the running unit."""

        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if self.in_backward:
                return
            self.unit = ROOT
            if self.saves_nothing:
                return
            self._saved_before += self._record_of(block).saved_bytes
            tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
            for tensor in tensors:
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(lambda *_: self._switch(block))
                    break

        return hook

    def _switch(self, unit: str) -> None:
        self.unit = unit

    def _record_first_use(self, module_name: str) -> Callable[..., None]:
        """A forward pre-hook that records whether a module first runs after the blocks."""

        def hook(*_: Any) -> None:
            self._first_use.setdefault(module_name, bool(self.order) and self.unit == ROOT)

        return hook

    def used_after_blocks(self, parameters: Iterable[list[str]]) -> set[str]:
        """Names of the root parameters whose modules first run after the blocks.

        `parameters` has all names of each parameter; the first one is returned.
        """
        return {
            names[0]
            for names in parameters
            if all(self._first_use.get(name.rpartition(".")[0], False) for name in names)
        }

    # ---- operations -------------------------------------------------------------------------

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation; a grouped product of any dtype with the shapes of one in bf16.

        Without data, PyTorch knows grouped products in bf16 alone. Where a model asks whether to
        drop a layer, the answer is no.
        """
        if func is SCALAR and self.drops_layers:
            return False
        if func.overloadpacket is not GROUPED_MATMUL or args[0].dtype == torch.bfloat16:
            return super().run(func, args, kwargs)
        operands = [
            x.to(torch.bfloat16) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for x in args
        ]
        made: torch.Tensor = func(*operands, **{**kwargs, "out_dtype": None})
        return torch.empty_strided(
            made.shape, made.stride(), dtype=args[0].dtype, device=args[0].device
        )

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Count one operation and track the storages it allocates."""
        tensors = tensors_in(out)
        flops = flops_of(func, args, kwargs, out)
        attends = ATTENTION in func.__name__
        if flops and not attends and self.order and self.unit == ROOT and not self.in_backward:
            # The last matmul outside the blocks computes the logits.
            self._logit_shape = (out.shape[-1], out.numel())
        if func is CAST and storage_key(args[0]) in self._fixed:
            # Autocast's narrower copy of a weight counts as a parameter, not as an activation.
            narrower = [t for t in tensors if t.itemsize < args[0].itemsize]
            for tensor in narrower:
                self._fixed.add(storage_key(tensor))
                self._forget_when_freed(tensor)
        copied = self._read_quantised(args) if flops and self._quantised else None
        if copied:
            shape = self.parameters[copied].shape
            self._record_moment(copied, dequantising_bytes(shape, args[0].itemsize))
        for tensor in tensors:
            self._track(tensor)
        if self.in_backward:
            if not attends:
                self._record_of(self.unit).gradient_flops += flops
            self._record_moment(copied, tensors[0].itemsize if copied else 0.0)
        elif not is_view(func, (args, kwargs), tensors):
            if not self.saves_nothing:
                self._count(func, flops, (args, kwargs), tensors)
            self._record_moment(copied, tensors[0].itemsize if copied else 0.0)

    def _read_quantised(self, args: tuple[Any, ...]) -> str | None:
        """Name of the quantised weight that an operation reads; None if there is none."""
        keys = [storage_key(t) for t in tensors_in(args)]
        return next((self._quantised[key] for key in keys if key in self._quantised), None)

    def _count(self, func: Any, flops: float, operands: Any, tensors: list[torch.Tensor]) -> None:
        """Count an operation of the forward in the running unit's record."""
        record = self._record_of(self.unit)
        attention = ATTENTION in func.__name__
        record.kernels += attention or flops > 0
        if attention:
            query, key = operands[0][:2]
            span = min(key.shape[-2], self.window or key.shape[-2])
            record.attention_flops += flops * span / key.shape[-2]
            record.attention_span = max(record.attention_span, span)
            record.head_dim = query.shape[-1]
            self._record_selective(record, tensors)
        elif flops:
            record.matmuls += 1
            record.matmul_flops += flops
            record.widths.append((flops, float(tensors[0].shape[-1])))
            if func.overloadpacket is GROUPED_MATMUL:
                record.grouped_flops += flops
                record.grouped_rows = max(record.grouped_rows, tensors[0].shape[0])
                record.experts = operands[0][1].shape[0]
            # Selective recompute saves the output of the first of every two matmuls.
            if record.matmuls % 2:
                self._record_selective(record, tensors)
                record.chosen_matmul_flops += flops
        else:
            self._count_elementwise(record, func, operands, tensors)

    def _count_elementwise(
        self, record: Record, func: Any, operands: Any, made: list[torch.Tensor]
    ) -> None:
        """Record an element-wise operation; tensors without gradients (masks) do not count."""
        given = tensors_in(operands)
        if not any(t.requires_grad for t in given):
            return

        def sizes(tensors: list[torch.Tensor]) -> dict[int, int]:
            known = [t for t in tensors if storage_key(t) in self._numbers]
            return {self._numbers[storage_key(t)]: touched_bytes(t) for t in known}

        read = sizes([t for t in given if t.requires_grad])
        cast = func is CAST
        record.elementwise.append(Elementwise(reads=read, writes=sizes(made), cast=cast))

    def _record_selective(self, record: Record, tensors: list[torch.Tensor]) -> None:
        """Record tensors that selective recompute would save."""
        alive = {storage_key(t): storage_size(t) for t in tensors}
        record.chosen_alive |= alive
        record.chosen_bytes += sum(alive.values())

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Saved-tensor hook: record that autograd saves a tensor, and return it unchanged."""
        if self.in_backward:
            return tensor
        record, key = self._record_of(self.unit), storage_key(tensor)
        record.matmul_flops_at_last_save = record.matmul_flops
        record.attention_flops_at_last_save = record.attention_flops
        record.chosen_matmul_flops_at_last_save = record.chosen_matmul_flops
        if key in self._fixed:
            return tensor
        record.chosen_read_bytes += record.chosen_alive.pop(key, 0)
        self._saved_numbers.add(self._numbers.get(key, 0))
        if key not in self._saved:
            self._saved.add(key)
            if self._is_logits(tensor):
                record.saved_logit_bytes += storage_size(tensor)
            else:
                record.saved_bytes += storage_size(tensor)
        return tensor

    def _is_logits(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the vocabulary width and the number of elements of the logits."""
        elements = storage_size(tensor) // tensor.itemsize
        return tensor.ndim > 0 and (tensor.shape[-1], elements) == self._logit_shape

    def _track(self, tensor: torch.Tensor) -> None:
        """Add a new storage to the live bytes, until it is freed."""
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key in self._fixed or key in self._live:
            return
        size, logits = storage.nbytes(), self._is_logits(tensor)
        self._live[key] = (size, logits)
        self._storages += 1
        self._numbers[key] = self._storages
        if self.in_backward and self.unit == ROOT and tuple(tensor.shape) in self._tied_shapes:
            # The head's gradient of a tied weight stays alive until the embedding's is added.
            self._gradients.add(key)
            self._add_gradient(ROOT, tensor.numel())
        else:
            self._live_bytes[logits] += size
        self._forget_when_freed(tensor)

    def _forget_when_freed(self, tensor: torch.Tensor) -> None:
        """Register a callback that forgets a storage when it is freed, since keys are reused."""
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        self._references[key] = weakref.ref(storage, lambda _, key=key: self._forget(key))  # type: ignore[misc]

    def _forget(self, key: int) -> None:
        """Remove a freed storage from all records and from the live bytes."""
        self._fixed.discard(key)
        self._saved.discard(key)
        size, logits = self._live.pop(key, (0, False))
        self._references.pop(key, None)
        for record in self.records.values():
            record.chosen_alive.pop(key, None)
        if key in self._gradients:
            self._gradients.discard(key)
        else:
            self._live_bytes[logits] -= size

    def _record_gradient(self, name: str) -> Callable[[torch.Tensor], None]:
        """A hook that counts a parameter's finished gradient apart from activations."""

        def hook(parameter: torch.Tensor) -> None:
            if parameter.grad is None:
                return
            key = storage_key(parameter.grad)
            size, logits = self._live.get(key, (0, False))
            if key not in self._gradients:
                self._gradients.add(key)
                self._live_bytes[logits] -= size
            self._add_gradient(self.unit_of[name], parameter.numel())

        return hook

    def _add_gradient(self, unit: str, elements: int) -> None:
        self._gradient_elements[unit] = self._gradient_elements.get(unit, 0.0) + elements

    def _record_moment(self, copied: str | None, copied_bytes: float) -> None:
        """Record the memory of the running unit now, with a copy of the weight `copied`."""
        if self.in_backward and self.unit not in self._below:
            return
        before = self._below[self.unit] if self.in_backward else self._saved_before
        made = self._gradient_elements.get(self.unit, 0.0) if self.in_backward else 0.0
        record = self._record_of(self.unit)
        forward = record.unsaved if self.saves_nothing else record.forward
        (record.backward if self.in_backward else forward).append(
            Moment(
                activation_bytes=max(0.0, self._live_bytes[0] - before),
                logit_bytes=self._live_bytes[1],
                gradient_elements=made,
                copied=copied and copied.removeprefix(f"{self.unit}."),
                copied_bytes=copied_bytes,
            )
        )

    def _record_of(self, unit: str) -> Record:
        """The record of a unit, created on first use."""
        return self.records.setdefault(unit, Record())

    # ---- results ----------------------------------------------------------------------------

    def stage(self, unit: str, tokens: int) -> Stage:
        """The recorded computation of `unit`, per token."""
        logits = self._logit_shape[1] if unit == ROOT else 0
        return self._record_of(unit).stage(tokens, self._saved_numbers, logits)
