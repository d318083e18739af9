"""Plan, run, measure and explain sharded data-parallel training on PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.version import __version__

__all__ = ["__version__", "estimate"]

if TYPE_CHECKING:
    from shardwise.api import estimate


def __getattr__(name: str) -> object:
    # Importing the package stays free; its functions load what they need when first asked for.
    if name == "estimate":
        from shardwise.api import estimate

        return estimate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
