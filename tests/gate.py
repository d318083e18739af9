"""Which cases of a test the gate runs. The others are left to nightly, which runs all."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
