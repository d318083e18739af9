"""Names that a page offers: models, devices, instances, optimizers and stacks."""

from __future__ import annotations

from typing import Any

from shardwise.spec import catalogue as known
from shardwise.spec.catalogue import traced
from shardwise.spec.hub import PATTERN
from shardwise.spec.instance import instances
from shardwise.spec.optimizer import OPTIMIZERS
from shardwise.spec.quantity import show_count
from shardwise.spec.version import __version__
from shardwise.stacks.write.exports import STACKS
from shardwise.step.memory_words import show_memory
from shardwise.units.decoder import decoder_units
from shardwise.units.kept_trace import kept_parameters

# Any length does: the number of parameters does not depend on it.
_SEQ_LEN = 128


def catalogue() -> dict[str, Any]:
    """Names of models, devices, instances, optimizers and stacks as JSON, with sizes."""
    return {
        "version": __version__,
        "models": [
            *(
                {"name": name, "size": _size(name), "hub": known.hub_names(name)}
                for name in known.model_names()
            ),
            *(
                {"name": n, "size": show_count(kept_parameters(n)), "hub": known.hub_names(n)}
                for n in traced.names()
            ),
        ],
        "hub_name": PATTERN,
        "devices": [
            {
                "name": name,
                "title": device.title or name,
                "memory": show_memory(device.capacity),
                "node_size": device.node_size,
            }
            for name, device in known.devices().items()
        ],
        "instances": [
            {
                "name": name,
                "provider": instance.provider,
                "device": instance.device,
                "gpus": instance.gpus,
            }
            for name, instance in instances().items()
        ],
        "optimizers": list(OPTIMIZERS),
        "stacks": list(STACKS),
    }


def _size(name: str) -> str:
    """The number of parameters of a model as text, such as "8.03B"."""
    return show_count(decoder_units(known.model(name), _SEQ_LEN).numel)
