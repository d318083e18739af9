"""A causal LM whose head computes the loss too, so that the logits need not exist all at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from shardwise.spec.record import SpecError

# A label that the loss ignores.
IGNORED = -100


def apply_head_with_loss(loss: HeadWithLoss) -> None:
    """Make the model of `loss` compute its loss in the head whenever it is called with labels.

    `model(..., labels=labels)` then returns its usual output with `loss` and without `logits`.
    Keywords mean what they mean in transformers: `labels` are shifted inside, `shift_labels` are
    not; the loss is the mean over tokens or, with `num_items_in_batch`, the sum divided by it.
    Without labels the forward is unchanged. Names of parameters do not change.
    """

    @functools.wraps(loss.original_forward)
    def forward(*args: Any, **settings: Any) -> Any:
        return loss.model_forward(*args, **settings)

    loss.model.forward, loss.head.forward = forward, loss.head_forward


class HeadWithLoss:
    """The forward functions of a causal LM and of its head that compute the loss in the head.

    Logits of some hidden states come from the model's own forward, with the decoder replaced by a
    function that returns these states. So they include everything that a model does between its
    decoder and its logits (soft caps, scales).
    """

    # The value of strategy.loss, for errors.
    name = "chunked"

    def __init__(self, model: nn.Module) -> None:
        """Raises SpecError unless the model is a causal LM whose head follows its decoder."""
        self.model = model
        self.decoder, self.head = self._find_parts()
        self.original_forward = model.forward
        self.forward_of_head = self.head.forward
        self._decoder_owner = _parent_of(self.decoder, model)
        self._head_owner = _parent_of(self.head, model)
        # The type of the decoder's output, known after the first call.
        self._decoder_output: type = dict

    def _find_parts(self) -> tuple[nn.Module, nn.Module]:
        """(decoder, head); raises SpecError if other modules have parameters or the two overlap."""
        find_decoder = getattr(self.model, "get_decoder", None)
        find_head = getattr(self.model, "get_output_embeddings", None)
        decoder = find_decoder() if callable(find_decoder) else None
        head = find_head() if callable(find_head) else None
        if not isinstance(decoder, nn.Module) or not isinstance(head, nn.Module):
            raise self.refusal()
        known = {id(parameter) for part in (decoder, head) for parameter in part.parameters()}
        inside = any(part is decoder or part is self.model for part in head.modules()) or any(
            part is head or part is self.model for part in decoder.modules()
        )
        if inside or any(id(parameter) not in known for parameter in self.model.parameters()):
            raise self.refusal()
        return decoder, head

    def refusal(self) -> SpecError:
        """The error for a model that does not support this loss."""
        return SpecError(
            f"strategy.loss: {self.name} needs a transformers causal LM whose head follows its "
            f'decoder; {type(self.model).__name__} does not: set loss = "plain"'
        )

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
        targets = _next_labels(labels) if shift_labels is None else shift_labels
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
            logits: torch.Tensor = self.forward_of_head(hidden, *args, **settings)
            return logits
        return self.summed(hidden.contiguous(), targets)

    def summed(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss summed over tokens; parameters of the head are gathered."""
        raise NotImplementedError

    def _without_head(self, *args: Any, **settings: Any) -> tuple[Mapping[str, Any], torch.Tensor]:
        """The model's output with dummy logits, and the decoder's hidden states."""
        outputs: list[Any] = []

        def decoder(*args: Any, **settings: Any) -> Any:
            outputs.append(self.decoder(*args, **settings))
            return outputs[-1]

        def head(hidden: torch.Tensor) -> torch.Tensor:
            outputs.append(hidden)
            return hidden.new_zeros(1, 1, self.model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]

        with self._replaced_calls(decoder, head):
            output = self.original_forward(*args, **settings)
        if len(outputs) != 2 or not hasattr(outputs[0], "last_hidden_state"):
            raise self.refusal()
        if not hasattr(output, "logits"):
            raise self.refusal()
        self._decoder_output = type(outputs[0])
        return output, outputs[0].last_hidden_state

    def logits_of(
        self, hidden: torch.Tensor, of_head: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """The logits of hidden states from the model's own forward; `of_head` replaces its head."""
        calls: list[str] = []
        of_head = of_head or self.forward_of_head

        def decoder(*_: Any, **__: Any) -> Any:
            calls.append("decoder")
            return self._decoder_output(last_hidden_state=hidden)

        def head(hidden: torch.Tensor) -> torch.Tensor:
            calls.append("head")
            logits: torch.Tensor = of_head(hidden)
            return logits

        with self._replaced_calls(decoder, head):
            logits: torch.Tensor = self.original_forward().logits
        if calls != ["decoder", "head"] or logits.shape[:-1] != hidden.shape[:-1]:
            raise self.refusal()
        return logits

    @contextmanager
    def _replaced_calls(
        self, decoder: Callable[..., Any], head: Callable[..., Any]
    ) -> Iterator[None]:
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


def _next_labels(labels: torch.Tensor | None) -> torch.Tensor:
    """The label that follows each token; IGNORED for the last one of a sequence."""
    assert labels is not None
    return pad(labels, (0, 1), value=IGNORED)[..., 1:]


def _parent_of(part: nn.Module, model: nn.Module) -> tuple[nn.Module, str]:
    """The module that holds `part` as a child, and the name of that child."""
    return next(
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if child is part
    )
