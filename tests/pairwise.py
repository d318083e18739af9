"""Covering sets: few cases in which every possible pair of values of two factors occurs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import pytest

from tests.gate import first_in_gate

Factors = Mapping[str, Sequence[Any]]
Chosen = dict[str, Any]
# Two factors by name, in the order of the factors, each with the number of its value.
Pair = tuple[str, int, str, int]


def all_pairs(factors: Factors) -> list[Pair]:
    """Every pair of values of two factors, possible or not."""
    return [
        (one, i, other, j)
        for one, other in combinations(factors, 2)
        for i in range(len(factors[one]))
        for j in range(len(factors[other]))
    ]


def covering(factors: Factors, possible: Callable[[Chosen], bool]) -> list[Chosen]:
    """Cases with a value of every factor that together hold every pair a case can hold.

    `possible` tells whether a partial choice breaks a rule. Greedy and deterministic: each case
    starts from the first pair that no case has yet, and takes for each further factor the value
    that adds the most new pairs.
    """
    missing = dict.fromkeys(all_pairs(factors))
    cases: list[Chosen] = []
    while missing:
        one, i, other, j = pair = next(iter(missing))
        found = _complete(factors, possible, {one: i, other: j}, missing)
        if found is None:
            del missing[pair]  # no case can hold it
            continue
        for new in pairs_of(factors, found):
            missing.pop(new, None)
        cases.append(_values(factors, found))
    return cases


def pairwise(
    factors: Factors, possible: Callable[[Chosen], bool], gate: int
) -> pytest.MarkDecorator:
    """Run a test with a covering set as `case`: its `gate` richest cases, and the rest at night.

    At night also with another covering set, which takes the factors in the opposite order.
    """
    cases = richest_first(factors, covering(factors, possible))
    opposite = covering(dict(reversed([*factors.items()])), possible)
    cases += [case for case in opposite if case not in cases]
    names = partial(name_of, factors)
    return pytest.mark.parametrize("case", first_in_gate(gate, cases), ids=names)


def richest_first(factors: Factors, cases: Sequence[Chosen]) -> list[Chosen]:
    """The cases in such an order that the first few hold the most pairs."""
    left = [(case, held_pairs(factors, [case])) for case in cases]
    ordered, held = [], set[Pair]()
    while left:
        best = max(left, key=lambda one: len(one[1] - held))
        left.remove(best)
        ordered.append(best[0])
        held |= best[1]
    return ordered


def held_pairs(factors: Factors, cases: Iterable[Chosen]) -> set[Pair]:
    """The pairs that occur in any of the cases."""
    return {
        pair
        for case in cases
        for pair in pairs_of(factors, {name: factors[name].index(case[name]) for name in factors})
    }


def name_of(factors: Factors, case: Chosen) -> str:
    """What a case has other than the first value of each factor."""
    others = [name for name, values in factors.items() if case[name] != values[0]]
    return " ".join(f"{name}={case[name]}" for name in others) or "defaults"


def can_occur(factors: Factors, possible: Callable[[Chosen], bool], pair: Pair) -> bool:
    """Whether any case at all can hold the pair."""
    one, i, other, j = pair
    return _complete(factors, possible, {one: i, other: j}, {}) is not None


def pairs_of(factors: Factors, numbers: Mapping[str, int]) -> Iterator[Pair]:
    """The pairs that a choice, given by numbers of values, holds."""
    chosen = [name for name in factors if name in numbers]
    for one, other in combinations(chosen, 2):
        yield one, numbers[one], other, numbers[other]


def _values(factors: Factors, numbers: Mapping[str, int]) -> Chosen:
    return {name: factors[name][numbers[name]] for name in factors if name in numbers}


def _complete(
    factors: Factors,
    possible: Callable[[Chosen], bool],
    numbers: dict[str, int],
    missing: Mapping[Pair, None],
) -> dict[str, int] | None:
    """A value for every factor that breaks no rule, or None where there is none."""
    if not possible(_values(factors, numbers)):
        return None
    name = next((name for name in factors if name not in numbers), None)
    if name is None:
        return numbers

    def new_pairs(value: int) -> int:
        extended = {**numbers, name: value}
        return sum(name in pair and pair in missing for pair in pairs_of(factors, extended))

    for value in sorted(range(len(factors[name])), key=new_pairs, reverse=True):
        found = _complete(factors, possible, {**numbers, name: value}, missing)
        if found is not None:
            return found
    return None
