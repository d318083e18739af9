"""Shell completion: names of the catalogue and values of options."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def words(*known: str) -> Callable[[str], list[str]]:
    """A completion function that offers the given words."""

    def complete(incomplete: str) -> list[str]:
        return _that_begin(known, incomplete)

    return complete


def models(incomplete: str) -> list[str]:
    """Names of models that begin with `incomplete`; those on the hub once it has a slash."""
    from shardwise.spec import catalogue

    presets = catalogue.all_model_names()
    on_hub = [name for preset in presets for name in catalogue.hub_names(preset)]
    return _that_begin(on_hub if "/" in incomplete else presets, incomplete)


def clusters(incomplete: str) -> list[str]:
    """Clusters with each device that completes the end of `incomplete`, such as `4x8x…`."""
    from shardwise.spec import catalogue

    counts, x, name = incomplete.rpartition("x")
    # A device name may contain an x, so the text before the last x need not be counts.
    if not counts.replace("x", "").isdigit():
        counts, x, name = "", "", incomplete
    return [f"{counts}{x}{device}" for device in _that_begin(catalogue.devices(), name)]


def stacks(incomplete: str) -> list[str]:
    from shardwise.stacks.write.exports import STACKS

    return _that_begin(STACKS, incomplete)


def software(incomplete: str) -> list[str]:
    from shardwise.spec.software import software_names

    return _that_begin(software_names(), incomplete)


def _that_begin(known: Iterable[str], incomplete: str) -> list[str]:
    """The words that begin with `incomplete`, ignoring case, sorted."""
    return sorted(word for word in known if word.lower().startswith(incomplete.lower()))
