"""Shell completion: names of the catalogue and values of options."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

_COUNTS = re.compile(r"(?:\d+x){0,2}")


def completer(*known: str) -> Callable[[str], list[str]]:
    """A completion function that offers the given words."""

    def complete(incomplete: str) -> list[str]:
        return _starting_with(known, incomplete)

    return complete


def models(incomplete: str) -> list[str]:
    """Names of models that begin with `incomplete`; those on the hub once it has a slash."""
    from shardwise.spec import catalogue

    presets = catalogue.all_model_names()
    on_hub = [name for preset in presets for name in catalogue.hub_names(preset)]
    return _starting_with(on_hub if "/" in incomplete else presets, incomplete)


def clusters(incomplete: str) -> list[str]:
    """Clusters that begin with `incomplete`: counts such as `4x8x`, then a device or instance."""
    from shardwise.spec import catalogue
    from shardwise.spec.instance import instances

    counts = _COUNTS.match(incomplete)
    assert counts is not None  # no count is one, too
    start, name = counts[0], incomplete[counts.end() :]
    # An instance has its own number of GPUs: it takes one count at most.
    known = [*catalogue.devices(), *(instances() if start.count("x") < 2 else ())]
    return [f"{start}{one}" for one in _starting_with(known, name)]


def stacks(incomplete: str) -> list[str]:
    from shardwise.stacks.write.exports import STACKS

    return _starting_with(STACKS, incomplete)


def software(incomplete: str) -> list[str]:
    from shardwise.spec.software import software_names

    return _starting_with(software_names(), incomplete)


def _starting_with(known: Iterable[str], incomplete: str) -> list[str]:
    """The words that begin with `incomplete`, ignoring case, sorted."""
    return sorted(word for word in known if word.lower().startswith(incomplete.lower()))
