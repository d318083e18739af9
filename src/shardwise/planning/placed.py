"""Placements of model states as columns, one row each; a strategy is made only of a chosen row.

Rows of one form have the same kind, reshard and reduce at the same moments, and use the same kinds
of parallelism: only degrees differ, which no check of a strategy but divisibility depends on. So
one checked strategy stands for all rows of a form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, overload

import numpy as np

from shardwise.planning.layout import Layout
from shardwise.predict.configurations import Bools, Configurations, Ints
from shardwise.spec.mesh import Mesh
from shardwise.spec.strategy import Strategy


class Place(NamedTuple):
    """The degrees of one placement; `reshard` is the size of smaller groups, 0 without them."""

    mesh: Mesh
    expert: int = 1
    reshard: int = 0

    @classmethod
    def of(cls, strategy: Strategy) -> Place:
        """The degrees of a resolved strategy."""
        reshard = strategy.reshard_after_forward
        size = 0 if isinstance(reshard, bool) or reshard is None else reshard
        return cls(strategy.mesh, strategy.expert, size)

    @property
    def fields(self) -> dict[str, object]:
        """These degrees as fields of a Strategy."""
        resharded = {"reshard_after_forward": self.reshard} if self.reshard else {}
        return {**self.mesh._asdict(), "expert": self.expert, **resharded}


class Placed(Sequence[Strategy]):
    """Resolved strategies as rows: by row, an index into `forms`, and degrees."""

    def __init__(
        self,
        forms: Sequence[Strategy],
        form: Ints,
        places: Sequence[Place],
        *,
        exact: bool = False,
        settings: Configurations | None = None,
    ) -> None:
        """With `exact` the forms are the strategies of the rows, with their degrees.

        `settings` are the columns of the forms, if they are known.
        """
        self.forms, self.form, self.places, self.exact = forms, form, places, exact
        self._settings = settings
        self._made: dict[int, Strategy] = {}

    @classmethod
    def of(cls, strategies: Iterable[Strategy]) -> Placed:
        """Strategies that are there already: each is a form of its own."""
        if isinstance(strategies, Placed):
            return strategies
        forms = list(strategies)
        places = [Place.of(one) for one in forms]
        return cls(forms, np.arange(len(forms)), places, exact=True)

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, row: int) -> Strategy: ...
    @overload
    def __getitem__(self, row: slice) -> Placed: ...
    def __getitem__(self, row: int | slice) -> Strategy | Placed:
        """The strategy of a row, checked, or several rows."""
        if isinstance(row, slice):
            return self.take(np.arange(len(self))[row])
        row = range(len(self))[row]
        if row not in self._made:
            form, place = self.forms[int(self.form[row])], self.places[row]
            self._made[row] = form if self.exact else form.but(**place.fields)
        return self._made[row]

    def __iter__(self) -> Iterator[Strategy]:
        return (self[row] for row in range(len(self)))

    def take(self, rows: Ints) -> Placed:
        """The rows with these indices, and only their forms."""
        places = [self.places[row] for row in rows.tolist()]
        used, form = np.unique(self.form[rows], return_inverse=True)
        forms = [self.forms[number] for number in used.tolist()]
        return Placed(forms, form, places, exact=self.exact)

    def where(self, keeps: Callable[[Strategy], bool]) -> Placed:
        """The rows of the forms that `keeps` accepts, which must not depend on degrees."""
        return self.take(np.flatnonzero(self.by_form(keeps)))

    def by_form(self, asks: Callable[[Strategy], bool]) -> Bools:
        """By row, what `asks` says of its form."""
        found: Bools = np.asarray([asks(form) for form in self.forms], dtype=np.bool_)[self.form]
        return found

    def but(self, **changes: object) -> Placed:
        """The rows with some fields of every strategy changed, but not degrees."""
        forms = [form.but(**changes) for form in self.forms]
        return Placed(forms, self.form, self.places, exact=self.exact)

    def __add__(self, other: Placed) -> Placed:
        forms = [*self.forms, *other.forms]
        form = np.concatenate([self.form, other.form + len(self.forms)])
        exact = self.exact and other.exact
        return Placed(forms, form, [*self.places, *other.places], exact=exact)

    def layout(self, row: int) -> Layout:
        """The layout of a row."""
        place = self.places[row]
        return Layout(self.forms[int(self.form[row])].kind, place.mesh, place.expert)

    @cached_property
    def shares_states(self) -> Bools:
        """By row, whether several devices share one copy of the model states."""
        return np.asarray([place.mesh.states > 1 for place in self.places], dtype=np.bool_)

    @cached_property
    def columns(self) -> Configurations:
        """All settings as columns."""
        columns = (self._settings or Configurations.of(self.forms)).take(self.form)
        if self.exact:
            return columns
        degrees = np.asarray([(*place.mesh, *place[1:]) for place in self.places], dtype=np.int64)
        replicate, shard, context, tensor, expert, reshard = degrees.reshape(-1, 6).T
        # Tensor groups are neighbours, then context groups, then those that share states.
        return replace(
            columns,
            shard=shard * context,
            replicate=replicate,
            context=context,
            tensor=tensor,
            expert=expert,
            shard_stride=tensor,
            replicate_stride=shard * context * tensor,
            tensor_stride=np.ones_like(tensor),
            reshard_group=reshard,
        )


class Forms:
    """Checked strategies, one of each form, for many placements that share their other settings."""

    def __init__(self) -> None:
        self._index: dict[tuple[object, ...], int | None] = {}
        self.strategies: list[Strategy] = []
        self._columns: Configurations | None = None

    @property
    def columns(self) -> Configurations:
        """The settings of all forms so far."""
        if self._columns is None or len(self._columns) < len(self.strategies):
            self._columns = Configurations.of(self.strategies)
        return self._columns

    def index(self, key: tuple[object, ...], make: Callable[[], Strategy | None]) -> int | None:
        """The index of a form in `strategies`; None if `make` refuses the first of its rows."""
        if key not in self._index:
            made = make()
            self._index[key] = None if made is None else len(self.strategies)
            self.strategies += [] if made is None else [made]
        return self._index[key]
