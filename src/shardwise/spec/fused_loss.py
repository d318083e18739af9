"""The kernels of a fused loss: their names, their packages, and where they run."""

from __future__ import annotations

from importlib.util import find_spec

from shardwise.spec.record import SpecError
from shardwise.spec.strategy import LossKernel, Strategy

LOSS_KERNELS: dict[LossKernel, str] = {"liger": "Liger", "cut_cross_entropy": "Cut Cross-Entropy"}
# The name that pip installs, and the module that it has.
PACKAGES: dict[LossKernel, tuple[str, str]] = {
    "liger": ("liger-kernel", "liger_kernel"),
    "cut_cross_entropy": ("cut-cross-entropy", "cut_cross_entropy"),
}


def check_fused_loss(strategy: Strategy, device: str) -> None:
    """Raise SpecError if the strategy has a fused loss that this machine cannot run.

    `device` is the kind of device that trains; a kind that is not known yet counts as a GPU.
    """
    if strategy.loss != "fused":
        return
    if device == "cpu":
        raise SpecError(
            'strategy.loss: the kernels of a fused loss run on GPUs only; set loss = "chunked"'
        )
    package, module = PACKAGES[strategy.loss_kernel]
    if find_spec(module) is None:
        raise SpecError(
            f"strategy.loss: fused needs {package}, which is not installed: pip install {package}, "
            'or set loss = "chunked"'
        )
