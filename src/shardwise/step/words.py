"""Text for terms, verdicts, shares and ratios, the same on every screen and page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from shardwise.spec.mesh import INNER_AXES, Mesh
from shardwise.spec.strategy_words import KIND_NAMES, mesh_words
from shardwise.step.profile import StepProfile, Verdict

# Nanoseconds of a millisecond.
MILLISECOND = 1e6
# Terminal colours by tone.
COLOURS = {"good": "green", "fair": "yellow", "bad": "red"}

# Names of memory terms, in the order of a bar: model states first, then memory of a step.
TERMS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "reference": "reference model",
    "generation": "reserved for generation",
    "unsharded_parameters": "gathered parameters",
    "unsharded_gradients": "unsharded gradients",
    "reduce_buffers": "reduce buffers",
    "activations": "activations",
    "logits": "logits and loss",
    "working": "activations, logits, new gradients",
    "other": "token ids and labels",
}


class VerdictWords(NamedTuple):
    """A verdict as a predicate ("fits"), and its tone: good, fair or bad."""

    words: str
    tone: str


VERDICTS: dict[Verdict, VerdictWords] = {
    "fits": VerdictWords("fits", "good"),
    "at risk": VerdictWords("is at risk", "fair"),
    "does not fit": VerdictWords("does not fit", "bad"),
}


def strategy_words(profile: StepProfile) -> str:
    """The layout of a profile as words: "DDP", "ZeRO-3 in groups of 8"."""
    fields = profile.strategy
    shard, replicate = fields.get("shard") or 1, fields.get("replicate") or 1
    mesh = Mesh(replicate, shard, fields.get("context", 1), fields.get("tensor", 1))
    kind = fields.get("kind", "?")
    return KIND_NAMES.get(kind, str(kind)) + mesh_words(mesh)


def parallelism_words(kinds: Sequence[str]) -> str:
    """Kinds of parallelism as words: `expert, tensor and context parallelism`."""
    *first, last = kinds
    return f"{', '.join(first)} and {last} parallelism" if first else f"{last} parallelism"


def collective_names(
    collectives: Iterable[tuple[str, int, str]],
) -> dict[tuple[str, int, str], str]:
    """Names of collectives (operation, group size, axis): `all-gather, groups of 8`.

    The axis is named if it is one of INNER_AXES, or if two names would be equal: `all-gather,
    tensor 8`.
    """
    found = set(collectives)
    alike = Counter((op, size) for op, size, _ in found)
    names = {}
    for op, size, axis in found:
        named = axis and (axis in INNER_AXES or alike[op, size] > 1)
        group = f"{axis} {size}" if named else f"groups of {size}"
        names[op, size, axis] = f"{op.replace('_', '-')}, {group}"
    return names


def percent(share: float, digits: int = 0) -> str:
    """A share as text: `38%`; zero has no sign."""
    return f"{share:z,.{digits}%}"


def signed_percent(change: float, digits: int = 0) -> str:
    """A relative change as text: `+4%`, `-2%`; `0%` without a sign if it rounds to zero."""
    return _without_sign_of_zero(f"{change:+z,.{digits}%}")


def percent_points(change: float, digits: int = 1) -> str:
    """A difference of two shares as text: `+3.9 points`, `-0.4 points`, `0.0 points`."""
    return _without_sign_of_zero(f"{change * 100:+z,.{digits}f}") + " points"


def _without_sign_of_zero(text: str) -> str:
    """The text without its plus sign if it has no digit but 0."""
    return text if any(digit in text for digit in "123456789") else text.lstrip("+")


def comparison_words(error: float) -> str:
    """The comparison error as text: `within 2.0%, the error of comparison`."""
    return f"within {percent(error, 1)}, the error of comparison"


def speed_ratio_text(ratio: float) -> str:
    """A ratio of speeds as text: `2.2x as fast`, `9% faster`, `4% slower`, `as fast`."""
    if ratio >= 2:
        return f"{ratio:,.1f}x as fast"
    change = percent(abs(ratio - 1))
    if change == "0%":
        return "as fast"
    return f"{change} {'faster' if ratio > 1 else 'slower'}"


def ratio_text(ratio: float) -> str:
    """A ratio as text: `3.2x`, with more digits below 0.1."""
    return f"{ratio:,.1f}x" if ratio >= 0.1 else f"{ratio:.2g}x"


def range_text(low: float, high: float, show: Callable[[float], str]) -> str:
    """A range as text: `3% to 5%`, or one value if both ends are shown the same."""
    first, last = show(low), show(high)
    return first if first == last else f"{first} to {last}"


def error_words(error: float) -> tuple[str, str]:
    """A relative error as text, and its tone: good, fair or bad."""
    if error == 0:
        return "exact", "good"
    tone = "good" if abs(error) < 0.03 else "fair" if abs(error) < 0.10 else "bad"
    return signed_percent(error, 1), tone


def milliseconds(nanoseconds: float, form: str, whole_from: float) -> str:
    """Nanoseconds as text in milliseconds without a unit, in the format `form`.

    Without decimals from `whole_from` milliseconds on.
    """
    value = nanoseconds / MILLISECOND
    return f"{value:,.0f}" if value >= whole_from else f"{value:{form}}"


def capital(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]
