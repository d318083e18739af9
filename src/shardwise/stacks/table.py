"""A stack's file as a table of rows, read into the settings of a run and written from one.

A row is one setting: the key in the file, the field of a run, and how values of one become those of
the other. Order is meaning: a file is written in the order of its rows, and a row that is read sees
what rows before it have settled. Keys that mean something only together are a `Code`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from shardwise.spec.run import RunSpec
from shardwise.stacks.outcomes import UNSAID
from shardwise.stacks.read.imported import Reading, flag, real, whole

# Values that ask for nothing.
_INERT: tuple[object, ...] = (None, False, 0, [], {}, "")


class Form(NamedTuple):
    """How values of a key and of a field become each other; UNSAID settles and writes nothing."""

    # Of the file's table and the key.
    read: Callable[[Mapping[str, object], str], Any]
    write: Callable[[Any], Any] = lambda value: value


def means(ours: object) -> Form:
    """A flag that stands for one value of ours, and is written only for it."""
    return Form(
        lambda table, key: ours if flag(table, key, otherwise=False) else UNSAID,
        lambda value: True if value == ours else UNSAID,
    )


COUNT = Form(lambda table, key: _if_given(whole(table, key)))
NUMBER = Form(lambda table, key: _if_given(real(table, key)))
# Steps of a run, which 0 and -1 leave to the epochs.
STEPS = Form(
    lambda table, key: UNSAID if table.get(key) in (0, -1) else _if_given(whole(table, key))
)
# Of random numbers; a seed that is none is left to the stack.
SEED = Form(
    lambda table, key: seed if type(seed := table.get(key)) is int and 0 <= seed < 2**63 else UNSAID
)


def _if_given(value: object) -> Any:
    return UNSAID if value is None else value


@dataclass(frozen=True)
class Row:
    """One setting: theirs and ours, only theirs (no `field`), or only written."""

    key: str
    # A field of a strategy stands alone, others with their section, such as `train.seed`.
    field: str = ""
    form: Form | None = None
    # The stack's value where the key is absent, in the version that was checked.
    default: Any = UNSAID
    # Ours of that value, where it is another.
    ours: Any = UNSAID
    # What happens instead, where a run has no such setting.
    why: str = ""
    # The end of what is said where the key is given; None: nothing is said.
    more: str | None = ""
    # Whether it is read, by what rows before it have settled.
    when: Callable[[Reading], bool] | None = None
    # The stack's value of a run, where it is no field's alone.
    write: Callable[[RunSpec], Any] | None = None
    # Where reading takes more than a form.
    read: Callable[[Mapping[str, object], str, Reading], None] | None = None

    def read_into(self, table: Mapping[str, object], reading: Reading) -> None:
        if self.key in reading.undecided or (self.when is not None and not self.when(reading)):
            return
        if table.get(self.key) is None:
            # Another part of the file may have settled the field.
            if self.default is not UNSAID and not reading.has(self.field):
                if self.ours is UNSAID:
                    reading.default(self.key, {self.field: self.default})
                else:
                    reading.default(self.key, {self.field: self.ours}, self.default)
        elif self.why:
            value = table[self.key]
            if value is True or value not in _INERT:
                reading.lose(self.key, self.why)
        else:
            self._take(table, reading)

    def _take(self, table: Mapping[str, object], reading: Reading) -> None:
        if self.read is not None:
            self.read(table, self.key, reading)
            return
        value = UNSAID if self.form is None else self.form.read(table, self.key)
        if value is UNSAID and table[self.key] == "auto":
            reading.lose(self.field, f"{self.key} is not a number in this file")
        elif value is UNSAID:
            return
        elif self.more is None:
            reading.set(self.field, value)
        else:
            reading.given(self.key, {self.field: value}, why=self.more)

    def written(self, run: RunSpec) -> dict[str, Any]:
        if self.write is not None:
            value = self.write(run)
        elif self.field and self.form is not None:
            value = _ours(run, self.field)
            value = value if value is UNSAID else self.form.write(value)
        else:
            value = UNSAID
        return {} if value is UNSAID else {self.key: value}


@dataclass(frozen=True)
class Code:
    """Keys that mean something only together, and why that takes code."""

    keys: tuple[str, ...]
    why: str
    read: Callable[[Mapping[str, object], Reading], None] | None = None
    write: Callable[[RunSpec], Mapping[str, Any]] | None = None
    # The stack's values where keys are absent.
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def read_into(self, table: Mapping[str, object], reading: Reading) -> None:
        if self.read is not None:
            self.read(table, reading)

    def written(self, run: RunSpec) -> Mapping[str, Any]:
        return {} if self.write is None else self.write(run)


Table = tuple[Row | Code, ...]


def read_rows(rows: Table, table: Mapping[str, object], reading: Reading) -> None:
    """Settle what a file, or a part of one, says or leaves to the stack's defaults."""
    for row in rows:
        row.read_into(table, reading)


def write_rows(rows: Table, run: RunSpec) -> dict[str, Any]:
    """The file of a run."""
    table: dict[str, Any] = {}
    for row in rows:
        table |= row.written(run)
    return table


def keys_of(rows: Table) -> tuple[str, ...]:
    named = (row.keys if isinstance(row, Code) else (row.key,) for row in rows)
    return tuple(dict.fromkeys(key for keys in named for key in keys))


def but(rows: Table, changes: Mapping[str, Mapping[str, Any]]) -> Table:
    """The rows of a related stack, by key where they differ."""
    return tuple(
        replace(row, **changes[row.key]) if isinstance(row, Row) and row.key in changes else row
        for row in rows
    )


def lost(reasons: Mapping[str, str]) -> Table:
    """Rows of keys without a counterpart in a run, by what happens instead."""
    return tuple(Row(key, why=why) for key, why in reasons.items())


def defaults_of(rows: Table) -> dict[str, Any]:
    """The stack's own values of keys, as the rows say them."""
    defaults: dict[str, Any] = {}
    for row in rows:
        given = row.defaults if isinstance(row, Code) else {row.key: row.default}
        defaults |= {key: value for key, value in given.items() if value is not UNSAID}
    return defaults


def _ours(run: RunSpec, name: str) -> Any:
    """The value of a field; UNSAID where the run has no such section."""
    section, _, last = name.rpartition(".")
    record = getattr(run, section or "strategy")
    return UNSAID if record is None else getattr(record, last)
