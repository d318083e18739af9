"""Base class of the specs: frozen, without unknown keys, with errors that say what to change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from shardwise.spec.suggest import did_you_mean
from shardwise.spec.wording import sentences

__all__ = ["Problems", "Record", "SpecError", "SpecWarning", "did_you_mean"]


class SpecError(ValueError):
    """Invalid input. `problems` holds one sentence for each thing to change."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class SpecWarning(UserWarning):
    """A warning about a valid part of an input that is ignored."""


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

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Only fields that differ from their default, for a short repr."""
        for name, value in super().__repr_args__():
            field = type(self).model_fields.get(name or "")
            if field is None or value != field.get_default(call_default_factory=True):
                yield name, value

    @classmethod
    def read(cls, data: Mapping[str, object], where: str = "") -> Self:
        """Validate `data`; raise one SpecError that lists every problem, each under its key."""
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise SpecError(sentences(cls, error, where)) from None

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
        """Context in which a SpecError is collected instead of raised."""
        try:
            yield
        except SpecError as error:
            self.found.extend(error.problems)

    def raise_if_any(self) -> None:
        """Raise one SpecError with all collected problems, if there are any."""
        if self.found:
            raise SpecError(self.found)
