"""Plan, run, measure and explain sharded data-parallel training on PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.version import __version__

__all__ = ["Strategy", "__version__", "estimate", "micro_batch", "parallelize", "plan"]

if TYPE_CHECKING:
    from shardwise.api import estimate, plan
    from shardwise.loop import micro_batch, parallelize
    from shardwise.spec.strategy import Strategy

# Importing the package stays free; its functions load what they need when first asked for.
_HOMES = {
    "estimate": "shardwise.api",
    "plan": "shardwise.api",
    "parallelize": "shardwise.loop",
    "micro_batch": "shardwise.loop",
    "Strategy": "shardwise.spec.strategy",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
