"""Shell completion: names of the catalogue and values of options."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def words(*known: str) -> Callable[[str], list[str]]:
    """A completion from a few words."""

    def complete(incomplete: str) -> list[str]:
        return _that_begin(known, incomplete)

    return complete


def models(incomplete: str) -> list[str]:
    from shardwise.spec import catalogue

    return _that_begin(catalogue.model_names(), incomplete)


def clusters(incomplete: str) -> list[str]:
    """The device at the end of `4x8x…`, before any network."""
    from shardwise.spec import catalogue

    counts, x, name = incomplete.rpartition("x")
    # A device may have an x in its name, and what stands before it need not be a count.
    if not counts.replace("x", "").isdigit():
        counts, x, name = "", "", incomplete
    return [f"{counts}{x}{device}" for device in _that_begin(catalogue.devices(), name)]


def stacks(incomplete: str) -> list[str]:
    from shardwise.stacks.write.exports import STACKS

    return _that_begin(STACKS, incomplete)


def software(incomplete: str) -> list[str]:
    from shardwise.spec import catalogue

    return _that_begin(catalogue.software_names(), incomplete)


def _that_begin(known: Iterable[str], incomplete: str) -> list[str]:
    return sorted(word for word in known if word.lower().startswith(incomplete.lower()))
