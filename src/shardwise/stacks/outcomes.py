"""What became of each setting of another stack's file, as data and as sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from shardwise.spec.record import Record

# Marks a value that is not given; None can be a value.
ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "absent"})()
# Fields whose values are free text, which sentences put in quotes. The tokenizer "bytes", which
# means no tokenizer, is not quoted.
_TEXTS = ("data", "data.path", "data.tokenizer", "model.config", "train.folder",
          "train.checkpoint.to")  # fmt: skip

# What became of a setting: its value sets a field (given), its absence sets a field (default), it
# sets none (lost), or Shardwise does not know the key (unknown). A remark belongs to no setting.
Kind = Literal["given", "default", "lost", "unknown", "remark"]
# How a sentence names a setting: `key`, `key value`, `key = value`, `value`; sentence: only `why`.
Naming = Literal["key", "pair", "assignment", "value", "sentence"]


class Difference(NamedTuple):
    """A setting of a run that an exported file omits, or that the stack runs with another value.

    `fields` maps the names of settings in the run to their values there. `theirs` maps those of
    them that the stack replaces to its own values, if known.
    """

    why: str
    fields: Mapping[str, Any] = {}
    theirs: Mapping[str, Any] = {}
    # The subject of the sentence if `fields` is empty.
    about: str = ""

    @property
    def words(self) -> str:
        """The sentence that people read: "subject: why.", or only `why` if there is no subject."""
        named = (
            name if value is ABSENT else f"{name} = {_in_words(name, value)}"
            for name, value in self.fields.items()
        )
        start = self.about or ", ".join(named)
        return f"{start}: {self.why}." if start else self.why

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values; values that are ABSENT are left out."""
        return _without_absent(
            {
                **self._asdict(),
                "fields": _without_absent(self.fields),
                "theirs": _without_absent(self.theirs),
            }
        )


class Differences(list[Difference]):
    """A list of differences, with a shorthand to append one."""

    def add(self, why: str, fields: Mapping[str, Any] = {}, about: str = "") -> None:
        self.append(Difference(why, fields, about=about))


class Outcome(NamedTuple):
    """What became of one setting of a file; `fields` maps the run settings it sets to values."""

    kind: Kind
    # The setting's name in the file.
    key: str = ""
    theirs: Any = ABSENT
    fields: Mapping[str, Any] = {}
    # The end of the sentence, or the full sentence if there is no key.
    why: str = ""
    naming: Naming = "key"
    # Whose default it is, for the sentence, such as "TRL's".
    whose: str = "its"

    @property
    def is_lost(self) -> bool:
        """Whether the run lacks what the file asks for (lost or unknown)."""
        return self.kind in ("lost", "unknown")

    @property
    def words(self) -> str:
        """The sentence that people read about this setting."""
        if not self.key or self.naming == "sentence":
            return self.why
        if self.kind == "unknown":
            return f"{self.key}: unknown to Shardwise{self.why or '.'}"
        if self.kind == "default":
            value = "" if self.theirs is ABSENT else f" {value_text(self.theirs)}"
            return f"{self.key} is absent, so {self.whose} default{value} {self._settles}."
        if self.kind == "given" or self.fields:
            return f"{self._subject} {self._settles}."
        return f"{self._subject}: {self.why}."

    @property
    def _subject(self) -> str:
        """The start of the sentence: the key, the value or both, as `naming` says."""
        value = value_text(self.theirs)
        return {
            "key": self.key,
            "pair": f"{self.key} {value}",
            "assignment": f"{self.key} = {value}",
            "value": value,
        }[self.naming]

    @property
    def _settles(self) -> str:
        """The end of the sentence: "becomes field = value", or "holds" without fields."""
        # A kind is written without "=", as in "kind zero3".
        fields = (
            name
            if value is ABSENT
            else f"{name} {value}"
            if name == "kind"
            else f"{name} = {_in_words(name, value)}"
            for name, value in self.fields.items()
        )
        becomes = ", ".join(fields)
        return f"becomes {becomes}{self.why}" if becomes else f"holds{self.why}"

    def to_dict(self) -> dict[str, Any]:
        """The outcome as JSON values, with its sentence; values that are ABSENT are left out."""
        known = _without_absent({"kind": self.kind, "key": self.key, "theirs": self.theirs})
        return {**known, "fields": _without_absent(self.fields), "words": self.words}


def _without_absent(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are not ABSENT, with records as JSON objects."""
    return {
        name: value.model_dump(mode="json") if isinstance(value, Record) else value
        for name, value in values.items()
        if value is not ABSENT
    }


def _in_words(name: str, value: object) -> str:
    """The value of field `name` as text for a sentence; free text is quoted."""
    return repr(value) if name in _TEXTS and value != "bytes" else value_text(value)


def value_text(value: object) -> str:
    """The value as text for a sentence: true/false, at most 12 digits, items joined by commas."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "nothing"
    return f"{value:.12g}" if isinstance(value, float) else plain_text(value)


def plain_text(value: object) -> str:
    """`str(value)`; a fixed phrase for integers with more digits than Python prints."""
    try:
        return str(value)
    except ValueError:
        return "a number of thousands of digits"


def repr_text(value: object) -> str:
    """`repr(value)` for a sentence, cut to 60 characters."""
    try:
        return repr(value)[:60]
    except ValueError:
        return plain_text(value)
