"""What a page can name: models, devices, optimizers and stacks."""

from __future__ import annotations

from typing import Any

from shardwise.spec import catalogue as known
from shardwise.spec.optimizer import OPTIMIZERS
from shardwise.spec.quantity import show_count
from shardwise.stacks.write.exports import STACKS
from shardwise.step.memory_words import show_memory
from shardwise.units.decoder import decoder_units
from shardwise.version import __version__

# The number of parameters does not depend on it.
_SEQ_LEN = 128


def catalogue() -> dict[str, Any]:
    """All names, with what helps to choose among them."""
    return {
        "version": __version__,
        "models": [{"name": name, "size": _size(name)} for name in known.model_names()],
        "devices": [
            {
                "name": name,
                "title": device.title or name,
                "memory": show_memory(device.capacity),
                "node_size": device.node_size,
            }
            for name, device in known.devices().items()
        ],
        "optimizers": list(OPTIMIZERS),
        "stacks": list(STACKS),
    }


def _size(name: str) -> str:
    return show_count(decoder_units(known.model(name), _SEQ_LEN).numel)
