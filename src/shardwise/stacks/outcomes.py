"""What becomes of a setting in another stack's file: as data, and in the words that people read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from shardwise.spec.record import Record

# A value that a record does not say.
UNSAID: Any = type("Unsaid", (), {"__repr__": lambda self: "unsaid"})()
# Fields whose values are somebody's own text, which sentences put in quotes, but for bytes, which
# stands for no tokenizer.
_TEXTS = ("data", "data.path", "data.tokenizer", "model.config", "train.folder",
          "train.checkpoint.to")  # fmt: skip

# What became of a setting that was read: it settles a field as it is given or where it is absent
# (default), settles none (lost) or is known to nobody (unknown). A remark is no setting's.
Kind = Literal["given", "default", "lost", "unknown", "remark"]
# How a sentence names what is given: `key`, `key value`, `key = value`, `value`, or in `why`.
Naming = Literal["key", "pair", "assignment", "value", "sentence"]


class Difference(NamedTuple):
    """A setting of a run that an exported file leaves to the user, or that a stack runs otherwise.

    `fields` are its names in a run and their values there; `theirs` those of them that the stack
    uses instead, where that is known.
    """

    why: str
    fields: Mapping[str, Any] = {}
    theirs: Mapping[str, Any] = {}
    # What it is about, where no field is.
    about: str = ""

    @property
    def words(self) -> str:
        """The sentence: `why` is its end, or all of it where there is nothing to name."""
        named = (
            name if value is UNSAID else f"{name} = {_in_words(name, value)}"
            for name, value in self.fields.items()
        )
        start = self.about or ", ".join(named)
        return f"{start}: {self.why}." if start else self.why

    def to_dict(self) -> dict[str, Any]:
        return _said({**self._asdict(), "fields": _said(self.fields), "theirs": _said(self.theirs)})


class Differences(list[Difference]):
    """Collects differences."""

    def add(self, why: str, fields: Mapping[str, Any] = {}, about: str = "") -> None:
        self.append(Difference(why, fields, about=about))


class Outcome(NamedTuple):
    """What reading a file makes of one setting; `fields` are those of a run that it settles."""

    kind: Kind
    # As the file names it.
    key: str = ""
    theirs: Any = UNSAID
    fields: Mapping[str, Any] = {}
    # The end of the sentence; all of it where no key is named.
    why: str = ""
    naming: Naming = "key"
    # Whose default it is.
    whose: str = "its"

    @property
    def is_lost(self) -> bool:
        """Whether the run does not have what the file asks for."""
        return self.kind in ("lost", "unknown")

    @property
    def words(self) -> str:
        if not self.key or self.naming == "sentence":
            return self.why
        if self.kind == "unknown":
            return f"{self.key}: unknown to Shardwise{self.why or '.'}"
        if self.kind == "default":
            value = "" if self.theirs is UNSAID else f" {shown(self.theirs)}"
            return f"{self.key} is absent, so {self.whose} default{value} {self._settles}."
        if self.kind == "given" or self.fields:
            return f"{self._subject} {self._settles}."
        return f"{self._subject}: {self.why}."

    @property
    def _subject(self) -> str:
        value = shown(self.theirs)
        return {
            "key": self.key,
            "pair": f"{self.key} {value}",
            "assignment": f"{self.key} = {value}",
            "value": value,
        }[self.naming]

    @property
    def _settles(self) -> str:
        # A kind is named as people speak of it.
        fields = (
            name
            if value is UNSAID
            else f"{name} {value}"
            if name == "kind"
            else f"{name} = {_in_words(name, value)}"
            for name, value in self.fields.items()
        )
        becomes = ", ".join(fields)
        return f"becomes {becomes}{self.why}" if becomes else f"holds{self.why}"

    def to_dict(self) -> dict[str, Any]:
        known = _said({"kind": self.kind, "key": self.key, "theirs": self.theirs})
        return {**known, "fields": _said(self.fields), "words": self.words}


def _said(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are said, as JSON has them."""
    return {
        name: value.model_dump(mode="json") if isinstance(value, Record) else value
        for name, value in values.items()
        if value is not UNSAID
    }


def _in_words(name: str, value: object) -> str:
    return repr(value) if name in _TEXTS and value != "bytes" else shown(value)


def shown(value: object) -> str:
    """A value as sentences write it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "nothing"
    return f"{value:.12g}" if isinstance(value, float) else plain(value)


def plain(value: object) -> str:
    """A value as a text; Python refuses to write out numbers of thousands of digits."""
    try:
        return str(value)
    except ValueError:
        return "a number of thousands of digits"


def quoted(value: object) -> str:
    """A value in a sentence, cut where it is long."""
    try:
        return repr(value)[:60]
    except ValueError:
        return plain(value)
