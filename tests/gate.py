"""Which cases of a test the gate runs. The others are left to nightly, which runs all."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product
from typing import Any

import pytest


def first_in_gate(count: int, cases: Sequence[Any]) -> list[Any]:
    """The cases, of which only the first `count` are in the gate.

    For pytest.mark.parametrize: a case is one value, or a tuple of one value for each argument.
    """
    return [_param(case, nightly=number >= count) for number, case in enumerate(cases)]


def in_gate(kept: Collection[Any], cases: Sequence[Any]) -> list[Any]:
    """The cases, of which only those that are also in `kept` are in the gate."""
    assert all(one in cases for one in kept)
    return [_param(case, nightly=case not in kept) for case in cases]


def _param(case: Any, *, nightly: bool) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=[pytest.mark.nightly] if nightly else [])


def in_turn(names: str, firsts: Sequence[Any], *others: Sequence[Any]) -> pytest.MarkDecorator:
    """Run a test with every combination at night; in the gate, each of `firsts` with one of them.

    They take turns, so that the gate has every value of every factor.
    """
    combinations = list(product(*others))
    cases = [
        _param((first, *values), nightly=at != number % len(combinations))
        for number, first in enumerate(firsts)
        for at, values in enumerate(combinations)
    ]
    return pytest.mark.parametrize(names.split(","), cases)
