"""Turn pydantic's validation errors into sentences: what a value must be, and what was given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, get_args

from pydantic import BaseModel, ValidationError

from shardwise.spec.foreign_text import cut
from shardwise.spec.suggest import did_you_mean

# Words for the expected type, by the beginning of pydantic's error type.
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "a text",
    "dict": "a table",
    "mapping": "a table",
    "model": "a table",
    "tuple": "a list",
    "list": "a list",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}
_LONGEST_VALUE = 60


class KeyedProblem(str):
    """The text `key: reason` about an invalid key, with both parts as attributes."""

    key: str
    reason: str

    def __new__(cls, key: str, reason: str) -> Self:
        problem = super().__new__(cls, f"{key}: {reason}")
        problem.key, problem.reason = key, reason
        return problem

    def __reduce__(self) -> tuple[type[KeyedProblem], tuple[str, str]]:
        """Pickle support: rebuild the problem from its key and reason."""
        return type(self), (self.key, self.reason)


def without_key(problem: str, key: str) -> str:
    """A problem without its leading key if it is about `key`; otherwise unchanged."""
    if isinstance(problem, KeyedProblem) and problem.key == key:
        return problem.reason
    return problem


def sentences(cls: type[BaseModel], error: ValidationError, where: str) -> list[str]:
    """One sentence for each invalid key, in the order of the errors; keys begin with `where`."""
    by_key: dict[str, list[Mapping[str, Any]]] = {}
    for problem in error.errors(include_url=False):
        path = _path(problem)
        by_key.setdefault(".".join([*([where] if where else []), *path]), []).append(problem)
    found = []
    for key, problems in by_key.items():
        sentence = _sentence(cls, problems)
        found.append(KeyedProblem(key, sentence) if key else sentence)
    return found


def value_sentence(error: ValidationError) -> str:
    """The sentence for an error of a single value: what it must be, and what was given."""
    return _sentence(None, list(error.errors(include_url=False)))


def _path(problem: Mapping[str, Any]) -> list[str]:
    """The keys that lead to the value, without the branches of unions that pydantic adds."""
    parts = list(problem["loc"])
    # An unknown key may look like a branch of a union, so it is always kept.
    extra = parts[-1:] if problem["type"] == "extra_forbidden" else []
    kept = (part for part in parts if _is_key(part) or part in extra)
    return [cut(str(part), _LONGEST_VALUE) for part in kept]


def _is_key(part: object) -> bool:
    """Whether a part of pydantic's location is a key, not a branch of a union."""
    branches = ("bool", "int", "float", "str")
    return not (isinstance(part, str) and (part in branches or "[" in part or "-" in part))


def _sentence(cls: type[BaseModel] | None, problems: list[Mapping[str, Any]]) -> str:
    """The sentence for all problems of one key, without the key."""
    first = problems[0]
    if first["type"] == "extra_forbidden" and cls is not None:
        path = _path(first)
        known = _fields_at(cls, path[:-1])
        hint = did_you_mean(path[-1], known)
        return f"unknown key{hint or '; known keys are ' + ', '.join(sorted(known))}"
    if first["type"] == "missing":
        return "is required"
    if first["type"] == "literal_error" and len(problems) == 1:
        choices = _choices(first)
        listed = ", ".join(choices)
        hint = did_you_mean(str(first["input"]), choices)
        return f"{_given_text(first)} is not one of {listed}{hint}"
    own = next((problem for problem in problems if problem["type"] == "value_error"), None)
    if own is not None:
        message = str(own["msg"]).removeprefix("Value error, ").rstrip(".")
        given = _given_text(own)
        return f"{message} (got {given})" if given and given not in message else message
    # The value may match any branch of a union, so all are named.
    expected = " or ".join(dict.fromkeys(_expected(problem) for problem in problems))
    given = _given_text(first)
    return f"must be {expected}, not {given}" if given else f"must be {expected}"


def _expected(problem: Mapping[str, Any]) -> str:
    """Words for the expected value, such as "at least 1" or "a whole number"."""
    kind = str(problem["type"])
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        bound = problem["ctx"][name]
        return f"{words} {bound:,}" if isinstance(bound, int) else f"{words} {bound:g}"
    if kind == "literal_error":
        return f"one of {', '.join(_choices(problem))}"
    return _TYPES.get(kind.partition("_")[0], "a value of another kind")


def _choices(problem: Mapping[str, Any]) -> list[str]:
    """The allowed values of a literal."""
    expected = str(problem["ctx"]["expected"]).replace(" or ", ", ")
    return [choice.strip().strip("'") for choice in expected.split(",")]


def _given_text(problem: Mapping[str, Any]) -> str:
    """The given value as text, cut if it is long; empty for values that are not text or numbers."""
    given = problem["input"]
    if not isinstance(given, (str, int, float)):
        return ""
    try:
        # A text that is a number needs no quotes.
        number = isinstance(given, str) and given.replace(".", "").removeprefix("-").isdecimal()
        text = str(given) if number else repr(given)
    except ValueError:  # a number of thousands of digits
        return ""
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


def _fields_at(cls: type[BaseModel], path: list[str]) -> list[str]:
    """The names of the fields at `path` below `cls`; empty if there are none."""
    here: type[BaseModel] = cls
    for part in path:
        field = here.model_fields.get(part)
        if field is None:
            return []
        candidates = [field.annotation, *get_args(field.annotation)]
        models = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not models:
            return []
        here = models[0]
    return list(here.model_fields)
