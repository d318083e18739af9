"""Dtype and place of model states: the words of `strategy.states` and `strategy.offload`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from shardwise.spec.record import SpecError
from shardwise.spec.suggest import did_you_mean

# The dtype of parameters, gradients and moments between steps. Stochastic rounds each update up or
# down at random, so that the expected parameter is the exact one.
States = Literal["fp32", "bf16", "bf16+stochastic"]
STATES: tuple[States, ...] = get_args(States)
STOCHASTIC: States = "bf16+stochastic"

# What stays in host memory between its uses. `parameters` includes the optimizer, whose update
# then runs where the parameters are.
Part = Literal["optimizer", "parameters", "activations"]
PARTS: tuple[Part, ...] = get_args(Part)
# How several parts are written; parameters alone are `true`, nothing is `false`.
Offload = Literal[
    "optimizer", "activations", "optimizer+activations", "parameters+activations"
]  # fmt: skip

_FLAGS = {"none": False, "false": False, "true": True}
_EXPECTED = f"is not true, false, none, nor one or more of {', '.join(PARTS)}"


def read_states(states: object) -> dict[str, object]:
    """Strategy fields of a value of `states`; ValueError if it is not one."""
    if states not in STATES:
        raise ValueError(
            f"{str(states)[:60]!r} is not one of {', '.join(STATES)}"
            f"{did_you_mean(str(states), STATES)}"
        )
    master = "fp32" if states == "fp32" else "bf16"
    # What the dtype of master weights says alone is not said twice.
    return {"master_dtype": master, "states": STOCHASTIC if states == STOCHASTIC else None}


def parse_states(text: str) -> dict[str, object]:
    """Strategy fields from `--states`; SpecError if it cannot be read."""
    try:
        return read_states(text)
    except ValueError as error:
        raise SpecError(f"states: {error}") from None


def read_offload(value: object) -> bool | str:
    """The canonical form of `offload` from a flag, a word, words joined by + or comma, or a list.

    ValueError if it cannot be read.
    """
    if isinstance(value, bool):
        return value
    listed = value.replace(",", "+").split("+") if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple, set, frozenset)):
        raise ValueError(f"{str(value)[:60]!r} {_EXPECTED}")
    words = [str(word).strip().lower() for word in listed]
    if len(words) < 2 and set(words) <= set(_FLAGS):
        return any(_FLAGS[word] for word in words)
    for word in words:
        if word not in PARTS:
            raise ValueError(f"{word[:60]!r} {_EXPECTED}{did_you_mean(word, PARTS)}")
    return joined_offload(words)


def parse_offload(value: object) -> bool | str:
    """The canonical form of `offload`, false for None; SpecError if it cannot be read."""
    try:
        return read_offload(False if value is None else value)
    except ValueError as error:
        raise SpecError(f"offload: {error}") from None


def joined_offload(parts: Iterable[str]) -> bool | str:
    """The canonical form of `offload` for a set of parts."""
    chosen = set(parts)
    if "parameters" in chosen:
        chosen.discard("optimizer")
    if chosen <= {"parameters"}:
        return bool(chosen)
    return "+".join(part for part in PARTS if part in chosen)


def offloaded_parts(offload: bool | str) -> tuple[Part, ...]:
    """The parts that a canonical `offload` keeps in host memory."""
    if isinstance(offload, bool):
        return ("parameters",) if offload else ()
    return tuple(part for part in PARTS if part in offload.split("+"))


def offload_option(offload: bool | str) -> str:
    """The options of a command for a canonical `offload`: "--offload-optimizer"; may be empty."""
    flags = {"parameters": "--offload"}
    return " ".join(flags.get(part, f"--offload-{part}") for part in offloaded_parts(offload))


def offload_words(offload: bool | str) -> str:
    """A canonical `offload` in words: "optimizer and activations in host memory"; may be empty."""
    if offload is True:
        return "offload to host memory"
    parts = offloaded_parts(offload)
    return f"{' and '.join(parts)} in host memory" if parts else ""


def offload_of(
    parameters: bool | None, optimizer: bool | None, activations: bool | None
) -> bool | str | None:
    """The canonical `offload` of three flags of a command; None if none is given."""
    if (parameters, optimizer, activations) == (None, None, None):
        return None
    flags = {"parameters": parameters, "optimizer": optimizer, "activations": activations}
    return joined_offload(part for part, flag in flags.items() if flag)
