"""The micro-batches of one rank at one step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from shardwise.spec.record import SpecError
from shardwise.spec.train import DataSettings
from shardwise.train.order import samples_at
from shardwise.train.tokenize import tokenized

# A label the loss leaves out.
IGNORED = -100


class MicroBatch(NamedTuple):
    """Token ids and, for each, the id that follows it."""

    inputs: torch.Tensor
    targets: torch.Tensor

    @property
    def tokens(self) -> int:
        """How many predictions the loss counts."""
        return int((self.targets != IGNORED).sum())


class Layout(NamedTuple):
    """How a step's sequences are laid out over ranks and micro-batches."""

    rank: int
    world: int
    micro_batch: int
    accumulate: int
    seq_len: int
    # Where a run that goes on does so: at this step, after so many sequences of all ranks.
    first_step: int = 0
    first_sequence: int = 0

    @property
    def sequences_per_step(self) -> int:
        return self.world * self.micro_batch * self.accumulate

    def sequences_before(self, step: int) -> int:
        """How many all ranks together have been given before a step."""
        return self.first_sequence + (step - self.first_step) * self.sequences_per_step

    def positions(self, step: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Global positions of this rank's sequences: (accumulate, micro_batch)."""
        first = self.sequences_before(step)
        grid = np.arange(first, first + self.sequences_per_step, dtype=np.int64)
        return grid.reshape(self.accumulate, self.world, self.micro_batch)[:, self.rank]


class Batches(Protocol):
    """Where micro-batches come from. Fewer than asked for means that the data has ended."""

    layout: Layout

    def go_on(self, step: int, sequence: int) -> None:
        """The next step is this one, after so many sequences of all ranks."""
        ...

    def at(self, step: int) -> list[MicroBatch]: ...


class _Anywhere:
    """Batches that are a function of their position."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def go_on(self, step: int, sequence: int) -> None:
        self.layout = self.layout._replace(first_step=step, first_sequence=sequence)


class TokenBatches(_Anywhere):
    """Sequences cut from tokenized files, in an order that does not depend on the processes."""

    def __init__(self, data: DataSettings, layout: Layout, vocab: int | None, seed: int) -> None:
        super().__init__(layout)
        self._tokens = tokenized(data)
        self._seed, self._shuffle = seed, data.shuffle
        # Neighbours share a token: the last target of one is the first input of the next.
        self._count = (len(self._tokens) - 1) // layout.seq_len
        if self._count < 1:
            raise SpecError(
                f"data.path: {len(self._tokens):,} tokens are fewer than one sequence of "
                f"{layout.seq_len:,}; shorten job.seq_len or give more text"
            )
        made_for = int(self._tokens.about["vocab"])
        if vocab is not None and made_for > vocab:
            raise SpecError(
                f"data.tokenizer: makes {made_for:,} tokens but the model knows {vocab:,}; set "
                f"model.vocab = {made_for} or choose the model's own tokenizer"
            )

    def at(self, step: int) -> list[MicroBatch]:
        seq_len = self.layout.seq_len
        rows = self.layout.positions(step)
        samples = samples_at(rows.ravel(), self._count, self._seed, self._shuffle)
        read = [self._tokens.read(int(s) * seq_len, seq_len + 1) for s in samples]
        return [_split(torch.from_numpy(part)) for part in np.split(np.stack(read), len(rows))]


class SyntheticBatches(_Anywhere):
    """Made-up sequences that can be learned, each a function of the seed and its global position.

    A sequence counts in steps of its own, and loses count with one token in ten: a model that has
    understood predicts the nine.
    """

    def __init__(self, layout: Layout, vocab: int, seed: int) -> None:
        super().__init__(layout)
        self._vocab, self._seed = vocab, seed

    def at(self, step: int) -> list[MicroBatch]:
        rows = self.layout.positions(step)
        return [_split(torch.from_numpy(np.stack([self._sample(p) for p in row]))) for row in rows]

    def _sample(self, position: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        random = np.random.default_rng((self._seed, int(position)))
        length = self.layout.seq_len + 1
        steps = np.full(length, random.integers(1, 9), dtype=np.int64)
        lost = random.random(length) < 0.1
        lost[0] = True
        steps[lost] = random.integers(0, self._vocab, int(lost.sum()))
        return np.cumsum(steps) % self._vocab


class ForeignBatches:
    """Micro-batches from the user's own iterable, as it gives them to this rank."""

    def __init__(self, source: str, layout: Layout) -> None:
        from shardwise.units.build import find_function

        self._source, self.layout = source, layout
        made = find_function(source, "data.source")(layout.rank, layout.world)
        self._iterator: Iterator[Any] = iter(made)

    def go_on(self, step: int, sequence: int) -> None:
        """Pass over what was used before: of an iterable nothing else is known."""
        used = sequence // (self.layout.world * self.layout.micro_batch)
        for _ in itertools.islice(self._iterator, used):
            pass
        self.layout = self.layout._replace(first_step=step, first_sequence=sequence)

    def at(self, step: int) -> list[MicroBatch]:
        found = []
        for _ in range(self.layout.accumulate):
            ids = next(self._iterator, None)
            if ids is None:
                break
            tensor = torch.as_tensor(ids)
            expected = (self.layout.micro_batch, self.layout.seq_len + 1)
            if tuple(tensor.shape) != expected:
                raise SpecError(
                    f"data.source: {self._source} gave a batch of shape {tuple(tensor.shape)}; "
                    f"expected {expected}: micro_batch sequences of seq_len + 1 ids"
                )
            found.append(_split(tensor.long()))
        return found


def make_batches(data: DataSettings, layout: Layout, vocab: int | None, seed: int) -> Batches:
    if data.source is not None:
        return ForeignBatches(data.source, layout)
    if data.synthetic:
        return SyntheticBatches(layout, vocab or 256, seed)
    return TokenBatches(data, layout, vocab, seed)


def _split(ids: torch.Tensor) -> MicroBatch:
    return MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
