"""Words that screens and pages share: terms of memory, verdicts, errors and milliseconds."""

from __future__ import annotations

from typing import NamedTuple

from shardwise.step import Verdict

MILLISECOND = 1e6

# In the order of a bar: what rests first, what comes and goes after it.
TERMS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "unsharded_parameters": "gathered parameters",
    "unsharded_gradients": "unsharded gradients",
    "reduce_buffers": "reduce buffers",
    "activations": "activations",
    "logits": "logits and loss",
    "working": "activations, logits, new gradients",
    "other": "token ids and labels",
}


class VerdictWords(NamedTuple):
    """A verdict after "it", and its tone (good, fair or bad)."""

    words: str
    tone: str


VERDICTS: dict[Verdict, VerdictWords] = {
    "fits": VerdictWords("fits", "good"),
    "at risk": VerdictWords("is at risk", "fair"),
    "does not fit": VerdictWords("does not fit", "bad"),
}


def error_words(error: float) -> tuple[str, str]:
    """A relative error as text, and its tone: good, fair or bad."""
    if error == 0:
        return "exact", "good"
    if abs(error) < 0.0005:
        return "0.0%", "good"  # a sign would say more than is shown
    tone = "good" if abs(error) < 0.03 else "fair" if abs(error) < 0.10 else "bad"
    return f"{error:+.1%}", tone


def milliseconds(nanoseconds: float, form: str, whole_from: float) -> str:
    """Without a unit, written in `form`; from `whole_from` milliseconds on without decimals."""
    value = nanoseconds / MILLISECOND
    return f"{value:,.0f}" if value >= whole_from else f"{value:{form}}"
