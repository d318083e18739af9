"""The loss: cross entropy over all tokens at once (plain) or chunk by chunk (chunked).

The plain loss holds the logits of a micro-batch, tokens × vocabulary, several times. The chunked
loss holds the logits of one chunk of tokens. It computes the gradients of the hidden states and of
the head together with the loss, in the forward pass, so that no chunk's logits are kept or computed
twice. The backward pass only scales these gradients.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel

from shardwise.engine.context import Part, context_of
from shardwise.engine.packing import packed_settings
from shardwise.engine.sync import is_parallel, strategy_of
from shardwise.spec.record import SpecError

# A label that the loss ignores.
IGNORED = -100

# A function from hidden states, (1, tokens, width), to logits.
ChunkLogits = Callable[[torch.Tensor], torch.Tensor]


class LossSum(Protocol):
    """A function from token ids and targets (the next ids) to the loss summed over tokens.

    `positions` are given for packed examples, and start at 0 for each: see engine/packing.py.
    """

    def __call__(
        self, ids: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor: ...


class Logits(Protocol):
    """A function from token ids, (batch, sequence), to logits, (batch, sequence, vocabulary)."""

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor: ...


def loss_of(model: nn.Module) -> LossSum:
    """Return a function from token ids and targets to the loss, summed over tokens.

    The model's strategy decides between plain and chunked loss; without a strategy it is plain.
    """
    chunked = is_parallel(model) and strategy_of(model).loss == "chunked"
    return functools.partial(_chunked_sum if chunked else _plain_sum, model)


def logits_of(model: nn.Module) -> Logits:
    """Return a function from token ids to logits, for transformers models and other modules."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model

    def forward(ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        return _logits(model, ids, packed_settings(inner, positions))

    return forward


def _logits(model: nn.Module, ids: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
    """Run the forward; return the logits, (batch, sequence, vocabulary)."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    named = "input_ids" in inspect.signature(inner.forward).parameters or hasattr(inner, "config")
    output = model(input_ids=ids, **settings) if named else model(ids, **settings)
    logits = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor) or logits.ndim != 3:
        raise TypeError(
            f"{type(inner).__name__} returned {type(output).__name__}; the trainer needs "
            "logits of shape (batch, sequence, vocabulary)"
        )
    return logits


def _part(
    model: nn.Module,
    ids: torch.Tensor,
    targets: torch.Tensor,
    positions: torch.Tensor | None,
) -> Part:
    """The part of a micro-batch for this process; all of it without context parallelism."""
    context = context_of(model)
    if context is not None:
        return context.part(model, ids, targets, positions)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return Part(ids, targets, packed_settings(inner, positions))


def _plain_sum(
    model: nn.Module,
    ids: torch.Tensor,
    targets: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """The loss summed over tokens, from all logits at once."""
    part = _part(model, ids, targets, positions)
    # One expression, so that no variable keeps the logits alive during the backward pass.
    loss = _cross_entropy(
        _logits(model, part.ids, part.settings).flatten(0, 1), part.targets.flatten()
    )
    # With logits sharded by vocabulary, every process has the full loss.
    return loss.to_local() if isinstance(loss, DTensor) else loss


def _chunked_sum(
    model: nn.Module,
    ids: torch.Tensor,
    targets: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """The loss summed over tokens, from the model's chunked forward."""
    part = _part(model, ids, targets, positions)
    labels = {"shift_labels": part.targets, "num_items_in_batch": 1}
    loss: torch.Tensor = model(input_ids=part.ids, **labels, **part.settings).loss
    return loss


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The cross entropy summed over tokens, computed in fp32 (fp64 for fp64 logits)."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)


# ---- the chunked loss ----------------------------------------------------------------------------


def apply_chunked_loss(model: nn.Module, chunks: int) -> None:
    """Make `model` compute its loss in chunks whenever it is called with labels.

    `model(..., labels=labels)` then returns its usual output with `loss` and without `logits`.
    Keywords mean what they mean in transformers: `labels` are shifted inside, `shift_labels` are
    not; the loss is the mean over tokens or, with `num_items_in_batch`, the sum divided by it.
    Without labels the forward is unchanged. Names of parameters do not change.

    Raises:
        SpecError: The model is not a transformers causal LM whose head follows its decoder.
    """
    loss = _ChunkedLoss(model, chunks)

    @functools.wraps(loss.original_forward)
    def forward(*args: Any, **settings: Any) -> Any:
        return loss.model_forward(*args, **settings)

    model.forward, loss.head.forward = forward, loss.head_forward


class _ChunkedLoss:
    """The forward functions of a causal LM and of its head that compute the loss in chunks.

    The logits of a chunk come from the model's own forward, with the decoder replaced by a function
    that returns the chunk. So the logits include everything that a model does between its decoder
    and its logits (soft caps, scales).
    """

    def __init__(self, model: nn.Module, chunks: int) -> None:
        self.model, self.chunks = model, chunks
        self.decoder, self.head = self._find_parts()
        self.original_forward = model.forward
        self._head_forward = self.head.forward
        self._decoder_owner = _owner_of(self.decoder, model)
        self._head_owner = _owner_of(self.head, model)
        # The type of the decoder's output, known after the first call.
        self._decoder_output: type = dict

    def _find_parts(self) -> tuple[nn.Module, nn.Module]:
        """(decoder, head); raises SpecError if other modules have parameters or the two overlap."""
        find_decoder = getattr(self.model, "get_decoder", None)
        find_head = getattr(self.model, "get_output_embeddings", None)
        decoder = find_decoder() if callable(find_decoder) else None
        head = find_head() if callable(find_head) else None
        if not isinstance(decoder, nn.Module) or not isinstance(head, nn.Module):
            raise self._refusal()
        known = {id(parameter) for part in (decoder, head) for parameter in part.parameters()}
        inside = any(part is decoder or part is self.model for part in head.modules()) or any(
            part is head or part is self.model for part in decoder.modules()
        )
        if inside or any(id(parameter) not in known for parameter in self.model.parameters()):
            raise self._refusal()
        return decoder, head

    def _refusal(self) -> SpecError:
        """The error for a model that does not support the chunked loss."""
        return SpecError(refusal(type(self.model).__name__))

    def model_forward(
        self,
        *args: Any,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **settings: Any,
    ) -> Any:
        """The model's forward; with labels, its output has `loss`, and `logits` is None."""
        if labels is None and shift_labels is None:
            return self.original_forward(*args, **settings)
        output, hidden = self._without_head(*args, **settings)
        targets = _shifted(labels) if shift_labels is None else shift_labels
        # One call of the module itself: if the head is an FSDP unit, its hooks gather it.
        loss = self.head(hidden, targets=targets)
        if num_items_in_batch is None:
            loss = loss / (targets != IGNORED).sum()
        else:
            loss = loss / num_items_in_batch
        auxiliary = output.get("aux_loss")
        if auxiliary is not None and labels is not None:
            loss = loss + self.model.router_aux_loss_coef * auxiliary
        return type(output)(**{**output, "loss": loss, "logits": None})

    def head_forward(
        self, hidden: torch.Tensor, *args: Any, targets: torch.Tensor | None = None, **settings: Any
    ) -> torch.Tensor:
        """The head's forward; with targets, it returns the loss summed over tokens."""
        if targets is None:
            logits: torch.Tensor = self._head_forward(hidden, *args, **settings)
            return logits
        parameters = [p for p in self.head.parameters() if p.requires_grad]
        states = hidden.contiguous()
        return chunked_cross_entropy(self._logits, states, targets, parameters, self.chunks)

    def _without_head(self, *args: Any, **settings: Any) -> tuple[Mapping[str, Any], torch.Tensor]:
        """The model's output with dummy logits, and the decoder's hidden states."""
        outputs: list[Any] = []

        def decoder(*args: Any, **settings: Any) -> Any:
            outputs.append(self.decoder(*args, **settings))
            return outputs[-1]

        def head(hidden: torch.Tensor) -> torch.Tensor:
            outputs.append(hidden)
            return hidden.new_zeros(1, 1, self.model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]

        with self._replaced(decoder, head):
            output = self.original_forward(*args, **settings)
        if len(outputs) != 2 or not hasattr(outputs[0], "last_hidden_state"):
            raise self._refusal()
        if not hasattr(output, "logits"):
            raise self._refusal()
        self._decoder_output = type(outputs[0])
        return output, outputs[0].last_hidden_state

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of a chunk's hidden states, from the model's own forward."""
        calls: list[str] = []

        def decoder(*_: Any, **__: Any) -> Any:
            calls.append("decoder")
            return self._decoder_output(last_hidden_state=hidden)

        def head(hidden: torch.Tensor) -> torch.Tensor:
            calls.append("head")
            logits: torch.Tensor = self._head_forward(hidden)
            return logits

        with self._replaced(decoder, head):
            logits: torch.Tensor = self.original_forward().logits
        if calls != ["decoder", "head"] or logits.shape[:-1] != hidden.shape[:-1]:
            raise self._refusal()
        return logits

    @contextmanager
    def _replaced(self, decoder: Callable[..., Any], head: Callable[..., Any]) -> Iterator[None]:
        """A context that calls `decoder` and `head` instead of the model's modules.

        An entry in the `__dict__` of a module hides its submodule of the same name.
        """
        decoder_owner, decoder_name = self._decoder_owner
        head_owner, head_name = self._head_owner
        decoder_owner.__dict__[decoder_name] = _Replacement(self.decoder, decoder)
        head_owner.__dict__[head_name] = _Replacement(self.head, head)
        try:
            yield
        finally:
            del decoder_owner.__dict__[decoder_name]
            del head_owner.__dict__[head_name]


class _Replacement:
    """A callable that replaces a module and has the module's attributes."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        self._module, self._call = module, call

    def __call__(self, *args: Any, **settings: Any) -> Any:
        return self._call(*args, **settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def refusal(model: str) -> str:
    """The error for a model that does not support the chunked loss; `model` is its class."""
    return (
        "strategy.loss: chunked needs a transformers causal LM whose head follows its decoder; "
        f'{model} does not: set loss = "plain"'
    )


def _shifted(labels: torch.Tensor | None) -> torch.Tensor:
    """The label that follows each token; IGNORED for the last one of a sequence."""
    assert labels is not None
    return pad(labels, (0, 1), value=IGNORED)[..., 1:]


def _owner_of(part: nn.Module, model: nn.Module) -> tuple[nn.Module, str]:
    """The module that holds `part` as a child, and the name of that child."""
    return next(
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if child is part
    )


def chunked_cross_entropy(
    logits: ChunkLogits,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    parameters: Sequence[nn.Parameter],
    chunks: int,
) -> torch.Tensor:
    """The cross entropy summed over all tokens; holds the logits of one chunk at a time.

    Args:
        logits: A function from a chunk's hidden states, (1, tokens, width), to its logits.
        hidden: The hidden states of all tokens, (…, width), contiguous.
        targets: The id that each token must predict, or IGNORED.
        parameters: The parameters of `logits` that need a gradient.
        chunks: The number of chunks; each has ⌈tokens / chunks⌉ tokens, the last one the rest.
    """
    rows = -(-targets.numel() // chunks)
    if torch.is_grad_enabled() and (hidden.requires_grad or parameters):
        total: torch.Tensor = _LossWithGradients.apply(logits, rows, targets, hidden, *parameters)  # type: ignore[no-untyped-call]
        return total
    with torch.no_grad():
        parts = _chunks(hidden, targets, rows)
        losses = [
            _cross_entropy(logits(part).flatten(0, 1), labels.flatten()) for part, labels in parts
        ]
        return torch.stack(losses).sum()


class _LossWithGradients(torch.autograd.Function):
    """The summed loss; gradients of hidden states and head are computed in the forward.

    They are divided by the number of tokens, as for a mean, so that they fit fp16; the backward
    multiplies them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: ChunkLogits,
        rows: int,
        targets: torch.Tensor,
        hidden: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        tokens, losses = targets.numel(), []
        hidden_gradient = torch.empty_like(hidden) if hidden.requires_grad else None
        head_gradients: list[torch.Tensor] = []
        parts = _chunks(hidden, targets, rows)
        for number, (part, labels) in enumerate(parts):
            leaf = part.detach().requires_grad_(hidden.requires_grad)
            wanted = [leaf, *parameters] if hidden.requires_grad else list(parameters)
            with torch.enable_grad():
                loss = _cross_entropy(logits(leaf).flatten(0, 1), labels.flatten())
                gradients = list(torch.autograd.grad(loss / tokens, wanted))
            losses.append(loss.detach())
            if hidden_gradient is not None:
                _split(hidden_gradient, rows)[number].copy_(gradients.pop(0))
            if head_gradients:
                _add_to(head_gradients, gradients)
            else:
                head_gradients = gradients
            # Free them before the next chunk allocates its gradients.
            del gradients
        ctx.tokens, ctx.gradients = tokens, (hidden_gradient, *head_gradients)
        return torch.stack(losses).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "the chunked loss has no gradients for a second backward pass; call the model "
                'again, or set loss = "plain"'
            )
        gradients, ctx.gradients = ctx.gradients, None
        scale = grad_output * ctx.tokens
        return None, None, None, *(g if g is None else g.mul_(scale) for g in gradients)


def _chunks(
    hidden: torch.Tensor, targets: torch.Tensor, rows: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of hidden states (1, rows, width) and targets (1, rows, 1), one per chunk."""
    return zip(_split(hidden, rows), _split(targets.reshape(-1, 1), rows), strict=True)


def _split(tensor: torch.Tensor, rows: int) -> tuple[torch.Tensor, ...]:
    """The tensor (…, width) as chunks (1, rows, width)."""
    tokens = tensor.view(1, -1, tensor.shape[-1])
    parts: tuple[torch.Tensor, ...] = tokens.split(rows, dim=1)  # type: ignore[no-untyped-call]
    return parts


def _add_to(totals: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Add each gradient to its total, in place."""
    for total, gradient in zip(totals, gradients, strict=True):
        total.add_(gradient)
