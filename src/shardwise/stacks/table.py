"""Tables that map the keys of another stack's file to fields of a run, for reading and writing.

A row is one setting: its key in the file, its field in a run, and how to convert their values. Rows
are written in order. When a row is read, the fields set by earlier rows are known. Keys that mean
something only together are a `Code`. Dots in a key name tables inside the file, such as
`tensor_parallel.autotp_size`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from shardwise.spec.run import RunSpec
from shardwise.stacks.outcomes import ABSENT
from shardwise.stacks.read.imported import (
    Reading,
    boolean,
    finite_number,
    list_unknown,
    positive_integer,
    subtable,
)

# Values that switch a setting off.
_INERT: tuple[object, ...] = (None, False, 0, [], {}, "")


class Form(NamedTuple):
    """How to convert between the value of a key and the value of a field.

    ABSENT, returned by either function, means: set or write nothing.
    """

    # From the table with the key, the key, and what errors put before it, to the field's value.
    read: Callable[[Mapping[str, object], str, str], Any]
    write: Callable[[Any], Any] = lambda value: value


def boolean_form(ours: object) -> Form:
    """A form for a boolean key: true sets the field to `ours`, and only `ours` is written."""
    return Form(
        lambda table, key, where: ours if boolean(table, key, False, where) else ABSENT,
        lambda value: True if value == ours else ABSENT,
    )


def _value_or_absent(value: object) -> Any:
    """The value, or ABSENT for None."""
    return ABSENT if value is None else value


def _above_one(value: int | None) -> Any:
    """The value, or ABSENT for None and 1."""
    return ABSENT if value in (None, 1) else value


COUNT = Form(lambda table, key, where: _value_or_absent(positive_integer(table, key, where)))
# Number of devices that share something; 1 means that they do not, and neither sets nor writes.
DEGREE = Form(
    lambda table, key, where: _above_one(positive_integer(table, key, where)),
    _above_one,
)
NUMBER = Form(lambda table, key, where: _value_or_absent(finite_number(table, key, where)))
# Number of steps; 0 and -1 mean that epochs decide, and set nothing.
STEPS = Form(
    lambda table, key, where: (
        ABSENT
        if table.get(key) in (0, -1)
        else _value_or_absent(positive_integer(table, key, where))
    )
)
# A random seed below 2**63; any other value sets nothing.
SEED = Form(
    lambda table, key, where: (
        seed if type(seed := table.get(key)) is int and 0 <= seed < 2**63 else ABSENT
    )
)


@dataclass(frozen=True)
class Row:
    """One setting, with its key in the file and its field in a run.

    A row without `field` has no counterpart in a run; a row with only `write` is never read.
    """

    key: str
    # A strategy field is named alone, any other with its section, such as `train.seed`.
    field: str = ""
    form: Form | None = None
    # The stack's value if the key is absent, in the version that was checked.
    default: Any = ABSENT
    # The field's value for `default`, if it differs from `default`.
    ours: Any = ABSENT
    # Other fields that a given key sets, without a note.
    also: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # If a run has no such setting: the reason, which is reported; and the values that switch the
    # setting off, besides those that are false or empty.
    why: str = ""
    inert: tuple[object, ...] = ()
    # The end of the note for a key that is given; None: no note.
    more: str | None = ""
    # Whether to read the row, given what earlier rows have set; None: always.
    when: Callable[[Reading], bool] | None = None
    # From a run to the stack's value, if it depends on more than one field.
    write: Callable[[RunSpec], Any] | None = None
    # Reads the key, if a form is not enough.
    read: Callable[[Mapping[str, object], str, Reading], None] | None = None

    def read_into(self, table: Mapping[str, object], reading: Reading) -> None:
        """Set the field in `reading` from the key in `table`, or its default if absent."""
        if self.key in reading.undecided or (self.when is not None and not self.when(reading)):
            return
        path, _, key = self.key.rpartition(".")
        for name in path.split(".") if path else ():
            table = subtable(table, name)
        if table.get(key) is None:
            self._take_default(reading)
        elif self.why:
            value = table[key]
            if value is True or value not in (*_INERT, *self.inert):
                reading.lose(key, self.why)
        else:
            self._take(table, key, f"{path}." if path else "", reading)

    def _take_default(self, reading: Reading) -> None:
        """Set the field to the stack's default, if there is one."""
        # Another part of the file may have settled the field.
        if self.default is not ABSENT and not reading.has(self.field):
            if self.ours is ABSENT:
                reading.default(self.key, {self.field: self.default})
            else:
                reading.default(self.key, {self.field: self.ours}, self.default)

    def _take(self, table: Mapping[str, object], key: str, where: str, reading: Reading) -> None:
        """Set the field from a key that is given and has a counterpart in a run."""
        if self.read is not None:
            self.read(table, key, reading)
            return
        value = ABSENT if self.form is None else self.form.read(table, key, where)
        if value is ABSENT and table[key] == "auto":
            reading.lose(self.field, f"{key} is not a number in this file")
        elif value is ABSENT:
            return
        elif self.more is None:
            reading.set(self.field, value)
        else:
            reading.given(key, {self.field: value}, why=self.more)
        for name, other in self.also.items():
            reading.set(name, other)

    def written(self, run: RunSpec) -> dict[str, Any]:
        """The key and its value for a run; empty if nothing is written."""
        if self.write is not None:
            value = self.write(run)
        elif self.field and self.form is not None:
            value = _field_value(run, self.field)
            value = value if value is ABSENT else self.form.write(value)
        else:
            value = ABSENT
        return {} if value is ABSENT else {self.key: value}


@dataclass(frozen=True)
class Code:
    """Several keys that mean something only together; `why` says why they need code."""

    keys: tuple[str, ...]
    why: str
    read: Callable[[Mapping[str, object], Reading], None] | None = None
    write: Callable[[RunSpec], Mapping[str, Any]] | None = None
    # The stack's values for keys that are absent.
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def read_into(self, table: Mapping[str, object], reading: Reading) -> None:
        """Read all keys from `table` and set fields in `reading`."""
        if self.read is not None:
            self.read(table, reading)

    def written(self, run: RunSpec) -> Mapping[str, Any]:
        """The keys and their values for a run; empty if nothing is written."""
        return {} if self.write is None else self.write(run)


Table = tuple[Row | Code, ...]


def read_rows(rows: Table, table: Mapping[str, object], reading: Reading) -> None:
    """Read all rows from `table` into `reading`; keys that are absent set defaults."""
    for row in rows:
        row.read_into(table, reading)


def write_rows(rows: Table, run: RunSpec) -> dict[str, Any]:
    """The keys and values of the stack's file for a run, in the order of the rows."""
    table: dict[str, Any] = {}
    for row in rows:
        for key, value in row.written(run).items():
            *path, last = key.split(".")
            inside = table
            for name in path:
                inside = inside.setdefault(name, {})
            inside[last] = value
    return table


def keys_of(rows: Table) -> tuple[str, ...]:
    """The keys of all rows in the file, in order, each once."""
    named = (row.keys if isinstance(row, Code) else (row.key,) for row in rows)
    return tuple(dict.fromkeys(key for keys in named for key in keys))


def list_unknown_keys(
    rows: Table,
    table: Mapping[str, object],
    reading: Reading,
    others: Mapping[str, tuple[str, ...]],
) -> None:
    """Report keys of `table` and of tables in it that no row reads and `others` does not list.

    `others` is by table inside the file, with "" for the file itself: keys that no plan depends on.
    """
    keys = keys_of(rows)
    for name, more in others.items():
        where, inside = f"{name}." if name else "", table
        for part in name.split(".") if name else ():
            inside = subtable(inside, part)
        known = (key[len(where) :].partition(".")[0] for key in keys if key.startswith(where))
        list_unknown(reading, inside, dict.fromkeys((*known, *more)), where)


def with_changed_rows(rows: Table, changes: Mapping[str, Mapping[str, Any]]) -> Table:
    """The rows with some fields of a `Row` replaced; `changes` is by key."""
    return tuple(
        replace(row, **changes[row.key]) if isinstance(row, Row) and row.key in changes else row
        for row in rows
    )


def lost_rows(reasons: Mapping[str, str]) -> Table:
    """Rows for keys without a counterpart in a run; `reasons` is by key."""
    return tuple(Row(key, why=why) for key, why in reasons.items())


def defaults_of(rows: Table) -> dict[str, Any]:
    """The stack's default of each key that has one, by key."""
    defaults: dict[str, Any] = {}
    for row in rows:
        given = row.defaults if isinstance(row, Code) else {row.key: row.default}
        defaults |= {key: value for key, value in given.items() if value is not ABSENT}
    return defaults


def _field_value(run: RunSpec, name: str) -> Any:
    """The value of a field of the run; ABSENT if the run lacks that section."""
    section, _, last = name.rpartition(".")
    record = getattr(run, section or "strategy")
    return ABSENT if record is None else getattr(record, last)
