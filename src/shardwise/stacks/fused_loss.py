"""Fused losses in the files of fine-tuning stacks: which models they support, and their keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.spec.model import ModelSpec
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import LossKernel
from shardwise.stacks.read.imported import Reading, boolean, subtable

# Families for which the Trainer's Liger 0.8 and LLaMA-Factory 0.9.5 replace head and loss; and
# those of axolotl's Cut Cross-Entropy.
_OF_LIGER = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2",
             "gemma3_text", "olmo2", "phi3")  # fmt: skip
_FAMILIES: dict[LossKernel, tuple[str, ...]] = {
    "liger": _OF_LIGER,
    "cut_cross_entropy": (*_OF_LIGER, "olmo", "phi"),
}
OTHER_KERNELS = "norms, rotary positions and MLPs are planned as the model's own"
# axolotl's plugin and key of each kernel.
_PLUGINS: dict[LossKernel, tuple[str, str]] = {
    "liger": ("axolotl.integrations.liger.LigerPlugin", "liger_fused_linear_cross_entropy"),
    "cut_cross_entropy": (
        "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin",
        "cut_cross_entropy",
    ),
}


def has_fused_loss(run: RunSpec, kernel: LossKernel) -> bool:
    """Whether the run has this kernel, and stacks can run it for its model and device."""
    strategy, model = run.strategy, run.model
    if strategy.loss != "fused" or strategy.loss_kernel != kernel or run.cluster.device.is_cpu:
        return False
    return isinstance(model, ModelSpec) and model.family in _FAMILIES[kernel]


def fused_loss(kernel: LossKernel) -> dict[str, Any]:
    """The fields of a strategy with this kernel."""
    return {"loss": "fused", "loss_kernel": kernel}


# ---- the Trainer and LLaMA-Factory --------------------------------------------------------------


def write_liger(run: RunSpec) -> dict[str, Any]:
    """The keys of TrainingArguments for Liger's loss; empty without it."""
    return {"use_liger_kernel": True} if has_fused_loss(run, "liger") else {}


def read_liger(table: Mapping[str, object], reading: Reading) -> None:
    """Read `use_liger_kernel`, unless `liger_kernel_config` leaves head and loss out."""
    key, config = "use_liger_kernel", subtable(table, "liger_kernel_config")
    if not boolean(table, key, otherwise=False):
        return
    if boolean(config, "fused_linear_cross_entropy", otherwise=True):
        reading.given(key, fused_loss("liger"), why=f"; {OTHER_KERNELS}")
    else:
        reading.lose(key, OTHER_KERNELS)


# ---- axolotl ------------------------------------------------------------------------------------


def write_plugins(run: RunSpec) -> dict[str, Any]:
    """The keys of axolotl for a fused loss; empty without it."""
    for kernel, (plugin, key) in _PLUGINS.items():
        if has_fused_loss(run, kernel):
            return {"plugins": [plugin], key: True}
    return {}


def read_plugins(table: Mapping[str, object], reading: Reading) -> None:
    """Read the plugins of fused losses, and report other plugins as lost."""
    given = table.get("plugins")
    plugins = [str(one) for one in given] if isinstance(given, list) else []
    for kernel, (plugin, key) in _PLUGINS.items():
        # Cut Cross-Entropy is on if its plugin is.
        wanted = boolean(table, key, otherwise=kernel == "cut_cross_entropy" and plugin in plugins)
        if wanted and plugin in plugins:
            reading.given(key, fused_loss(kernel))
        elif wanted:
            reading.lose(key, f"axolotl ignores it without {plugin} in plugins")
    known = {plugin for plugin, _ in _PLUGINS.values()}
    if any(plugin not in known for plugin in plugins) or (given and not plugins):
        reading.lose("plugins", "what other plugins change is not planned")
    others = (key for key in table if key.startswith("liger_") and key != _PLUGINS["liger"][1])
    if any(table[key] for key in others):
        reading.lose("liger_*", OTHER_KERNELS)
