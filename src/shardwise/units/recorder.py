"""Record FLOPs, saved bytes and live memory of a forward and a backward, per block.

Module hooks tell which block runs, autograd's saved-tensor hooks tell what is saved for the
backward, and a dispatch mode sees the FLOPs of every operation and the storages it allocates.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from shardwise.engine.torch_private import (
    ATTENTION,
    CAST,
    CPU_ATTENTION,
    GROUPED_MATMUL,
    is_mutable,
    storage_id,
    tree_leaves,
)
from shardwise.pytorch.dispatch import DispatchMode, tensors_in
from shardwise.units.unit import (
    DEQUANTISING_BYTES,
    NOTHING,
    POLICIES,
    Kept,
    Moment,
    Policy,
    Stage,
    mean_width,
    prune,
)

ROOT = ""


@dataclass
class _Elementwise:
    """One element-wise kernel: bytes of the storages it reads and writes, by storage number."""

    reads: dict[int, int]
    writes: dict[int, int]
    # A cast is a separate kernel.
    cast: bool


@dataclass
class _Record:
    """What was recorded of one unit. Bytes and FLOPs are of the whole traced batch."""

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    # FLOPs and width of the output of each product.
    widths: list[tuple[float, float]] = field(default_factory=list)
    # Keys that a query sees, and the width of a head.
    attention_span: int = 0
    head_dim: int = 0
    # Of products that run all experts in one kernel: FLOPs, rows of the largest, and its experts.
    grouped_flops: float = 0.0
    grouped_rows: int = 0
    experts: int = 0
    # Of the backward's matmuls: frozen weights need no gradient, nor do inputs below all others.
    gradient_flops: float = 0.0
    kernels: int = 0
    # Element-wise operations in the order they ran.
    elementwise: list[_Elementwise] = field(default_factory=list)
    saved_bytes: float = 0.0
    saved_logit_bytes: float = 0.0
    input_bytes: float = 0.0
    # FLOPs until the last tensor was saved: recomputation stops there.
    matmul_flops_at_last_save: float = 0.0
    attention_flops_at_last_save: float = 0.0
    matmuls: int = 0
    # Outputs that selective recomputation keeps, and those of them that the backward reads.
    chosen_bytes: float = 0.0
    chosen_read_bytes: float = 0.0
    chosen_matmul_flops: float = 0.0
    chosen_matmul_flops_at_last_save: float = 0.0
    chosen_alive: dict[int, int] = field(default_factory=dict)
    # Memory after each operation, in bytes; and before one that reads a quantised weight.
    forward: list[Moment] = field(default_factory=list)
    # The same of a forward that saves nothing, as under full recompute.
    unsaved: list[Moment] = field(default_factory=list)
    backward: list[Moment] = field(default_factory=list)


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
        self._quantised = {_key(parameters[name]): name for name in quantised}
        self.records: dict[str, _Record] = {}
        self.order: list[str] = []
        self.unit = ROOT
        self.in_backward = False
        self.saves_nothing = False
        self.boundary_bytes = 0.0
        self._logit_shape = (-1, -1)
        self._first_use: dict[str, bool] = {}
        self._fixed = {_key(t) for t in parameters.values()}
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
        # What the embedding and the blocks so far have saved, without the one that runs.
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
            running += self._of(block).saved_bytes
        self._below[ROOT] = running + self._root_saved_before
        self.in_backward, self.unit = True, ROOT
        loss.backward()  # type: ignore[no-untyped-call]

    @contextmanager
    def without_saving(self) -> Iterator[None]:
        """Record a second forward, in which nothing is saved; after `backward`."""
        self.in_backward, self.saves_nothing, self.unit = False, True, ROOT
        with torch.no_grad():
            yield

    def _enter(self, block: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.in_backward:
                return
            if self.saves_nothing:
                self.unit = block
                self._saved_before = self._live_bytes[0] - self._of(block).input_bytes
                return
            if not self.order:
                self._root_saved_before = self._of(ROOT).saved_bytes
                self._of(ROOT).saved_bytes = 0.0
                self._saved_before = self._root_saved_before
            self.order.append(block)
            self.unit = block
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            inputs = [t for t in tensors if t.requires_grad]
            self._of(block).input_bytes = float(sum({_key(t): _size(t) for t in inputs}.values()))
            self.boundary_bytes = self._of(block).input_bytes
            if inputs and inputs[0].grad_fn is not None and len(self.order) == 1:
                inputs[0].grad_fn.register_prehook(lambda *_: self._switch("<embedding>"))

        return hook

    def _leave(self, block: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if self.in_backward:
                return
            self.unit = ROOT
            if self.saves_nothing:
                return
            self._saved_before += self._of(block).saved_bytes
            tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
            for tensor in tensors:
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(lambda *_: self._switch(block))
                    break

        return hook

    def _switch(self, unit: str) -> None:
        self.unit = unit

    def _record_first_use(self, module_name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._first_use.setdefault(module_name, bool(self.order) and self.unit == ROOT)

        return hook

    def used_after_blocks(self, parameters: Iterable[list[str]]) -> set[str]:
        """First names of root parameters whose module first runs after the blocks.

        `parameters` are all names of each.
        """
        return {
            names[0]
            for names in parameters
            if all(self._first_use.get(name.rpartition(".")[0], False) for name in names)
        }

    # ---- operations -------------------------------------------------------------------------

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Count one operation and track the storages it allocates."""
        tensors = tensors_in(out)
        flops = _flops(func, args, kwargs, out)
        if flops and self.order and self.unit == ROOT and not self.in_backward:
            # The last matmul outside the blocks computes the logits.
            self._logit_shape = (out.shape[-1], out.numel())
        if func is CAST and _key(args[0]) in self._fixed:
            # Autocast's narrower copy of a weight counts as a parameter, not as an activation.
            narrower = [t for t in tensors if t.itemsize < args[0].itemsize]
            for tensor in narrower:
                self._fixed.add(_key(tensor))
                self._watch(tensor)
        copied = self._read_quantised(args) if flops and self._quantised else None
        if copied:
            self._record_moment(copied, DEQUANTISING_BYTES)
        for tensor in tensors:
            self._track(tensor)
        if self.in_backward:
            if ATTENTION not in func.__name__:
                self._of(self.unit).gradient_flops += flops
            self._record_moment(copied, tensors[0].itemsize if copied else 0.0)
        elif not _is_view(func, (args, kwargs), tensors):
            if not self.saves_nothing:
                self._count(func, flops, (args, kwargs), tensors)
            self._record_moment(copied, tensors[0].itemsize if copied else 0.0)

    def _read_quantised(self, args: tuple[Any, ...]) -> str | None:
        """The quantised weight that an operation reads."""
        keys = [_key(t) for t in tensors_in(args)]
        return next((self._quantised[key] for key in keys if key in self._quantised), None)

    def _count(self, func: Any, flops: float, operands: Any, tensors: list[torch.Tensor]) -> None:
        record = self._of(self.unit)
        attention = ATTENTION in func.__name__
        record.kernels += attention or flops > 0
        if attention:
            record.attention_flops += flops
            query, key = operands[0][:2]
            record.attention_span = max(record.attention_span, key.shape[-2])
            record.head_dim = query.shape[-1]
            self._choose(record, tensors)
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
                self._choose(record, tensors)
                record.chosen_matmul_flops += flops
        else:
            self._count_elementwise(record, func, operands, tensors)

    def _count_elementwise(
        self, record: _Record, func: Any, operands: Any, made: list[torch.Tensor]
    ) -> None:
        """Record an element-wise operation; tensors without gradients (masks) do not count."""
        given = tensors_in(operands)
        if not any(t.requires_grad for t in given):
            return

        def sizes(tensors: list[torch.Tensor]) -> dict[int, int]:
            known = [t for t in tensors if _key(t) in self._numbers]
            return {self._numbers[_key(t)]: _touched(t) for t in known}

        read = sizes([t for t in given if t.requires_grad])
        cast = func is CAST
        record.elementwise.append(_Elementwise(reads=read, writes=sizes(made), cast=cast))

    def _choose(self, record: _Record, tensors: list[torch.Tensor]) -> None:
        alive = {_key(t): _size(t) for t in tensors}
        record.chosen_alive |= alive
        record.chosen_bytes += sum(alive.values())

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.in_backward:
            return tensor
        record, key = self._of(self.unit), _key(tensor)
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
                record.saved_logit_bytes += _size(tensor)
            else:
                record.saved_bytes += _size(tensor)
        return tensor

    def _is_logits(self, tensor: torch.Tensor) -> bool:
        elements = _size(tensor) // tensor.itemsize
        return tensor.ndim > 0 and (tensor.shape[-1], elements) == self._logit_shape

    def _track(self, tensor: torch.Tensor) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key in self._fixed or key in self._live:
            return
        size, logits = storage.nbytes(), self._is_logits(tensor)
        self._live[key] = (size, logits)
        self._storages += 1
        self._numbers[key] = self._storages
        if self.in_backward and self.unit == ROOT and tuple(tensor.shape) in self._tied_shapes:
            # The head's part of a tied gradient stays alive until the embedding's is added.
            self._gradients.add(key)
            self._add_gradient(ROOT, tensor.numel())
        else:
            self._live_bytes[logits] += size
        self._watch(tensor)

    def _watch(self, tensor: torch.Tensor) -> None:
        """Forget a storage when it is freed: its key is then given to another."""
        storage, key = tensor.untyped_storage(), _key(tensor)
        self._references[key] = weakref.ref(storage, lambda _, key=key: self._forget(key))  # type: ignore[misc]

    def _forget(self, key: int) -> None:
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
        def hook(parameter: torch.Tensor) -> None:
            if parameter.grad is None:
                return
            key = _key(parameter.grad)
            size, logits = self._live.get(key, (0, False))
            if key not in self._gradients:
                self._gradients.add(key)
                self._live_bytes[logits] -= size
            self._add_gradient(self.unit_of[name], parameter.numel())

        return hook

    def _add_gradient(self, unit: str, elements: int) -> None:
        self._gradient_elements[unit] = self._gradient_elements.get(unit, 0.0) + elements

    def _record_moment(self, copied: str | None, copied_bytes: float) -> None:
        if self.in_backward and self.unit not in self._below:
            return
        before = self._below[self.unit] if self.in_backward else self._saved_before
        made = self._gradient_elements.get(self.unit, 0.0) if self.in_backward else 0.0
        record = self._of(self.unit)
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

    def _of(self, unit: str) -> _Record:
        return self.records.setdefault(unit, _Record())

    # ---- results ----------------------------------------------------------------------------

    def stage(self, unit: str, tokens: int) -> Stage:
        """The recorded computation of `unit`, per token."""
        record = self._of(unit)
        kernels, moved = _fused(record.elementwise, self._saved_numbers)

        def front(moments: list[Moment]) -> tuple[Moment, ...]:
            per_token = [
                m._replace(
                    activation_bytes=m.activation_bytes / tokens, logit_bytes=m.logit_bytes / tokens
                )
                for m in moments
            ]
            return prune(per_token) or (NOTHING,)

        return Stage(
            matmul_flops=record.matmul_flops / tokens,
            attention_flops=record.attention_flops / tokens,
            attention_span=record.attention_span,
            head_dim=record.head_dim or 128,
            elementwise_bytes=moved / tokens,
            fused_bytes=moved / tokens,
            kernels=record.kernels + kernels,
            products=record.matmuls,
            product_width=mean_width(record.widths),
            grouped_flops=record.grouped_flops / tokens,
            routed=record.grouped_rows / tokens,
            experts=record.experts,
            logits=self._logit_shape[1] / tokens if unit == ROOT and record.matmuls else 0.0,
            gradient_flops=record.gradient_flops / tokens,
            kept=_kept(record, tokens),
            forward=front(record.forward),
            forward_unsaved=front(record.unsaved),
            backward=front(record.backward),
        )


def _kept(record: _Record, tokens: int) -> dict[Policy, Kept]:
    """What each policy keeps of a block for its backward; nothing if it has none."""
    if not record.saved_bytes:
        return {policy: Kept(activation_bytes=0.0) for policy in POLICIES}
    again = record.matmul_flops_at_last_save
    return {
        "none": Kept(
            activation_bytes=record.saved_bytes / tokens,
            logit_bytes=record.saved_logit_bytes / tokens,
        ),
        "selective": Kept(
            activation_bytes=(record.input_bytes + record.chosen_bytes) / tokens,
            recomputed_matmul_flops=(again - record.chosen_matmul_flops_at_last_save) / tokens,
            unread_bytes=(record.chosen_bytes - record.chosen_read_bytes) / tokens,
        ),
        "full": Kept(
            activation_bytes=record.input_bytes / tokens,
            recomputed_matmul_flops=again / tokens,
            recomputed_attention_flops=record.attention_flops_at_last_save / tokens,
        ),
    }


def _fused(operations: list[_Elementwise], saved: set[int]) -> tuple[int, float]:
    """(kernels, bytes) of element-wise operations, merged as the formulas count them.

    Coefficients were fitted with the formulas of `decoder`, which count rotary embeddings or the
    mean square of a norm as one operation. So operations are merged into one kernel if autograd
    does not save the result between them and only element-wise operations read it.
    """
    readers: dict[int, list[int]] = {}
    for index, operation in enumerate(operations):
        for number in operation.reads:
            readers.setdefault(number, []).append(index)
    kernel = list(range(len(operations)))

    def root(index: int) -> int:
        while kernel[index] != index:
            index = kernel[index]
        return index

    inner: set[int] = set()
    for index, operation in enumerate(operations):
        for number in operation.writes:
            after = [i for i in readers.get(number, []) if i > index]
            casts = operation.cast or any(operations[i].cast for i in after)
            if number in saved or not after or casts:
                continue
            inner.add(number)
            for reader in after:
                kernel[root(reader)] = root(index)
    touched: dict[tuple[int, int, bool], int] = {}
    for index, operation in enumerate(operations):
        for writes, sizes in ((False, operation.reads), (True, operation.writes)):
            for number, size in sizes.items():
                if number not in inner:
                    key = (root(index), number, writes)
                    touched[key] = max(touched.get(key, 0), size)
    kernels = len({root(index) for index in range(len(operations))})
    return kernels, float(sum(touched.values()))


def _is_view(func: Any, operands: Any, made: list[torch.Tensor]) -> bool:
    """Whether an operation runs no kernel: it returns storages of its inputs."""
    if is_mutable(func):
        return False
    given = {_key(t) for t in tensors_in(operands)}
    return all(_key(tensor) in given for tensor in made)


def _touched(tensor: torch.Tensor) -> int:
    """Bytes that a kernel reads or writes: at most the storage, less for a slice."""
    return min(tensor.numel() * tensor.itemsize, _size(tensor))


def _key(tensor: torch.Tensor) -> int:
    return storage_id(tensor.untyped_storage())


def _size(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """FLOPs by torch's flop registry, plus the CPU's fused attention and grouped matmuls."""
    if func is CPU_ATTENTION:
        query, key, value = args[:3]
        shapes = (query.shape, _expanded(key, query), _expanded(value, query))
        return float(sdpa_flop_count(*shapes))  # type: ignore[no-untyped-call]
    if func.overloadpacket is GROUPED_MATMUL:
        # Every row is multiplied with the matrix of one expert; in the backward every row adds to
        # the gradient of one expert's matrix.
        made = out if args[1].ndim == 3 else out[0]
        return 2.0 * float(made.numel()) * float(args[0].shape[-1])
    count = flop_registry.get(func.overloadpacket)
    return float(count(*args, **kwargs, out_val=out)) if count is not None else 0.0


def _expanded(tensor: torch.Tensor, like: torch.Tensor) -> torch.Size:
    """The shape of keys or values after expansion to all query heads (GQA)."""
    return torch.Size((tensor.shape[0], like.shape[1], *tensor.shape[2:]))
