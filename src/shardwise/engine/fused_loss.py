"""The fused loss: a kernel of liger-kernel or cut-cross-entropy computes head and cross entropy.

The packages are imported only when a model with this loss is called. They need CUDA devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.engine.head_with_loss import IGNORED, HeadWithLoss, apply_head_with_loss
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import LossKernel

# A function from hidden states (tokens, width), the head, targets (tokens) and a soft cap to the
# loss summed over tokens.
Kernel = Callable[[torch.Tensor, nn.Linear, torch.Tensor, float | None], torch.Tensor]


def apply_fused_loss(model: nn.Module, kernel: LossKernel) -> None:
    """Make `model` compute its loss in a fused kernel whenever it is called with labels.

    Raises SpecError if the kernel does not support what the model does after its decoder.
    """
    apply_head_with_loss(_FusedLoss(model, kernel))


class _FusedLoss(HeadWithLoss):
    """A head that hands its weights and the hidden states to a fused kernel."""

    name = "fused"

    def __init__(self, model: nn.Module, kernel: LossKernel) -> None:
        super().__init__(model)
        head = self.head
        if type(head) is not nn.Linear or (kernel != "liger" and head.bias is not None):
            raise self.refusal()
        self.linear, self.kernel = head, KERNELS[kernel]
        # Known after the first call, when the model has returned hidden states.
        self._softcap: tuple[float | None] | None = None

    def summed(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self._softcap is None:
            self._softcap = (self._find_softcap(hidden),)
        states = hidden.view(-1, hidden.shape[-1])
        return self.kernel(states, self.linear, targets.reshape(-1), self._softcap[0])

    @torch.no_grad()
    def _find_softcap(self, hidden: torch.Tensor) -> float | None:
        """The soft cap that the model's forward applies to the head's output; None without one.

        The forward is run on one hidden state, with known numbers instead of the head's output.
        Raises SpecError if it scales them, or changes the hidden state before the head.
        """
        cap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)  # type: ignore[union-attr, operator]
        one = torch.linspace(-1, 1, hidden.shape[-1], device=hidden.device).view(1, 1, -1)
        known = torch.linspace(-50, 50, 11, device=hidden.device).view(1, 1, -1)
        unchanged: list[bool] = []

        def of_head(states: torch.Tensor) -> torch.Tensor:
            unchanged.append(torch.equal(states, one))
            return known

        found = self.logits_of(one, of_head)
        expected = known if cap is None else cap * torch.tanh(known / cap)
        if not all(unchanged) or not torch.allclose(found.float(), expected):
            raise SpecError(
                f"strategy.loss: {type(self.model).__name__} scales its hidden states or its "
                'logits, which a fused kernel does not do; set loss = "chunked"'
            )
        return cap


def _liger(
    hidden: torch.Tensor, head: nn.Linear, targets: torch.Tensor, softcap: float | None
) -> torch.Tensor:
    """The summed loss from Liger's fused linear cross entropy.

    Gradients are computed in the forward, as those of a mean, so that they fit fp16.
    """
    from liger_kernel.transformers.functional import (  # type: ignore[import-not-found]
        liger_fused_linear_cross_entropy,
    )

    mean: torch.Tensor = liger_fused_linear_cross_entropy(
        hidden, head.weight, targets, head.bias, ignore_index=IGNORED, softcap=softcap
    )
    return mean * (targets != IGNORED).sum()


def _cut_cross_entropy(
    hidden: torch.Tensor, head: nn.Linear, targets: torch.Tensor, softcap: float | None
) -> torch.Tensor:
    """The summed loss from Cut Cross-Entropy, which needs 16-bit inputs and does not cast them."""
    from cut_cross_entropy import linear_cross_entropy  # type: ignore[import-not-found]

    weight: Any = head.weight
    if torch.is_autocast_enabled(hidden.device.type):
        low = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(low), weight.to(low)
    total: torch.Tensor = linear_cross_entropy(
        hidden, weight, targets, ignore_index=IGNORED, softcap=softcap, reduction="sum"
    )
    return total


KERNELS: dict[LossKernel, Kernel] = {"liger": _liger, "cut_cross_entropy": _cut_cross_entropy}
