"""What every spec shares: frozen, no unknown keys, and errors a person can act on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError


class SpecError(ValueError):
    """Input that cannot be meant. `problems` holds one sentence for each thing to change."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class Record(BaseModel):
    """Base of the specs. Build from outside data with `read`, which explains what is wrong."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        validate_default=True,
        # A schema is built when it is first needed: most commands need few.
        defer_build=True,
    )

    @classmethod
    def read(cls, data: Mapping[str, object], where: str = "") -> Self:
        """Validate `data`; raise one SpecError that lists every problem, each under its key."""
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise SpecError(_sentences(cls, error, where)) from None

    def but(self, **changes: object) -> Self:
        """A validated copy with some fields changed."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).read({**fields, **changes})


class Problems:
    """Collects the SpecErrors of several inputs, so that they can be reported together."""

    def __init__(self) -> None:
        self.found: list[str] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        try:
            yield
        except SpecError as error:
            self.found.extend(error.problems)

    def raise_if_any(self) -> None:
        if self.found:
            raise SpecError(self.found)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` or nothing, to be appended to a sentence about `word`."""
    import difflib

    choices = list(known)
    folded = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(word.lower(), folded, n=1, cutoff=0.6)
    return f"; did you mean '{folded[close[0]]}'?" if close else ""


def _sentences(cls: type[BaseModel], error: ValidationError, where: str) -> list[str]:
    sentences: dict[str, str] = {}
    for problem in error.errors(include_url=False):
        path = [str(part) for part in problem["loc"] if _is_key(part)]
        key = ".".join([*([where] if where else []), *path])
        # Of the branches of a union, the first says best what was expected.
        sentence = f"{key}: {_sentence(cls, problem, path)}" if key else _bare(problem)
        sentences.setdefault(key or sentence, sentence)
    return list(sentences.values())


def _is_key(part: object) -> bool:
    # Union branches appear in `loc` as type names, which mean nothing to the user.
    branches = ("bool", "int", "float", "str")
    return not (isinstance(part, str) and (part in branches or "[" in part or "-" in part))


def _bare(problem: Any) -> str:
    return str(problem["msg"]).removeprefix("Value error, ")


def _sentence(cls: type[BaseModel], problem: Any, path: list[str]) -> str:
    kind, given = problem["type"], problem["input"]
    if kind == "extra_forbidden":
        known = _fields_at(cls, path[:-1])
        hint = did_you_mean(path[-1], known)
        return f"unknown key{hint or '; known keys are ' + ', '.join(sorted(known))}"
    if kind == "missing":
        return "is required"
    if kind == "literal_error":
        expected = str(problem["ctx"]["expected"]).replace(" or ", ", ")
        choices = [choice.strip().strip("'") for choice in expected.split(",")]
        hint = did_you_mean(str(given), choices)
        return f"{given!r} is not one of {', '.join(choices)}{hint}"
    message = _bare(problem)
    shown = repr(given) if isinstance(given, (str, int, float)) else ""
    return f"{message} (got {shown})" if shown and shown not in message else message


def _fields_at(cls: type[BaseModel], path: list[str]) -> list[str]:
    """The keys that are known at `path` below `cls`."""
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
