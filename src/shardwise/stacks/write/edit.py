"""One edit of a file: a key with its old and new value."""

from __future__ import annotations

from typing import Any, NamedTuple

from shardwise.stacks.outcomes import ABSENT, value_text

Path = tuple[str, ...]


class Edit(NamedTuple):
    """One key of a file with its old and new value; ABSENT where the key is absent."""

    key: Path
    old: Any
    new: Any

    @property
    def words(self) -> str:
        """The edit as people read it: a sign, the key, and its values."""
        name = ".".join(self.key)
        if self.new is ABSENT:
            return f"- {name}: {_value(self.old)}"
        if self.old is ABSENT:
            return f"+ {name}: {_value(self.new)}"
        return f"~ {name}: {_value(self.old)} -> {_value(self.new)}"

    def to_dict(self) -> dict[str, Any]:
        """The edit as JSON values; an absent value is left out."""
        values = {"old": self.old, "new": self.new}
        return {
            "key": ".".join(self.key),
            **{name: value for name, value in values.items() if value is not ABSENT},
        }


def _value(value: object) -> str:
    """A value for a line, cut to 60 characters."""
    text = ", ".join(map(str, value)) if isinstance(value, list) else value_text(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
