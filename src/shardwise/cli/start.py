"""Where the `shardwise` command begins: two settings that must come before the first import."""

from __future__ import annotations

import gc
import os


def main() -> None:
    """Start fast, then hand over to the application."""
    # A command that answers in half a second makes no garbage worth collecting, and collecting
    # amid thousands of fresh imports takes a tenth of that time. Long commands turn it on again.
    gc.disable()
    # Looking for pydantic plugins reads the metadata of every installed package.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from shardwise.cli.main import run

    run()
