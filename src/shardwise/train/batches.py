"""The micro-batches of one rank at one step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from shardwise.engine.loss import IGNORED
from shardwise.engine.materialize import named_seed
from shardwise.spec.record import SpecError
from shardwise.spec.train import DataSettings
from shardwise.train.chat import is_chat
from shardwise.train.order import samples_at
from shardwise.train.packing import DataStatistics, Sequences
from shardwise.train.tokenize import find_files, tokenized


class MicroBatch(NamedTuple):
    """Token ids and, for each, the id that follows it.

    Positions are those of packed examples, each from 0 on; None where a sequence is one example.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        """How many predictions the loss counts."""
        return int((self.targets != IGNORED).sum())

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch(
            self.inputs.to(device, non_blocking=True),
            self.targets.to(device, non_blocking=True),
            None if self.positions is None else self.positions.to(device, non_blocking=True),
        )


class Layout(NamedTuple):
    """How the sequences of a step are distributed over ranks and micro-batches.

    `rank` and `world` count ranks that have different sequences.
    """

    rank: int
    world: int
    micro_batch: int
    accumulate: int
    seq_len: int
    # Where a resumed run continues: completed steps, and sequences that all ranks have used.
    first_step: int = 0
    first_sequence: int = 0

    @property
    def sequences_per_step(self) -> int:
        return self.world * self.micro_batch * self.accumulate

    def sequences_before(self, step: int) -> int:
        """Sequences that all ranks together have used after `step` completed steps."""
        return self.first_sequence + (step - self.first_step) * self.sequences_per_step

    def positions(self, step: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Global positions of this rank's sequences: (accumulate, micro_batch)."""
        first = self.sequences_before(step)
        grid = np.arange(first, first + self.sequences_per_step, dtype=np.int64)
        return grid.reshape(self.accumulate, self.world, self.micro_batch)[:, self.rank]


class Batches(Protocol):
    """The source of micro-batches. Fewer than needed means that the data has ended."""

    layout: Layout
    # Of chat examples only.
    statistics: DataStatistics | None

    def seek(self, step: int, sequence: int) -> None:
        """Continue after `step` completed steps and `sequence` sequences of all ranks."""
        ...

    def at(self, step: int) -> list[MicroBatch]:
        """The micro-batches that follow `step` completed steps."""
        ...


class _RandomAccess:
    """Batches that are a function of their position."""

    statistics: DataStatistics | None = None

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def seek(self, step: int, sequence: int) -> None:
        self.layout = self.layout._replace(first_step=step, first_sequence=sequence)


class TokenBatches(_RandomAccess):
    """Sequences of tokenized files, in an order that does not depend on the number of ranks."""

    def __init__(self, data: DataSettings, layout: Layout, vocab: int | None, seed: int) -> None:
        super().__init__(layout)
        self._tokens = tokenized(data)
        self._seed, self._shuffle = seed, data.shuffle
        # Adjacent sequences share a token: the last target of one is the next one's first input.
        self._count = (len(self._tokens) - 1) // layout.seq_len
        if self._count < 1:
            raise SpecError(
                f"data.path: has {len(self._tokens):,} tokens, less than one sequence of "
                f"{layout.seq_len:,}; reduce job.seq_len or add more text"
            )
        _check_vocab(int(self._tokens.about["vocab"]), vocab)

    def at(self, step: int) -> list[MicroBatch]:
        seq_len = self.layout.seq_len
        rows = self.layout.positions(step)
        samples = samples_at(rows.ravel(), self._count, self._seed, self._shuffle)
        tokens = [self._tokens.read(int(s) * seq_len, seq_len + 1) for s in samples]
        return [_split(torch.from_numpy(part)) for part in np.split(np.stack(tokens), len(rows))]


class ExampleBatches(_RandomAccess):
    """Sequences of chat examples, packed or padded, in the same kind of order as text."""

    def __init__(self, data: DataSettings, layout: Layout, vocab: int | None, seed: int) -> None:
        super().__init__(layout)
        self._sequences = Sequences(data, layout.seq_len)
        self.statistics = self._sequences.statistics
        self._seed, self._shuffle, self._packing = seed, data.shuffle, data.packing
        _check_vocab(self._sequences.vocab, vocab)

    def at(self, step: int) -> list[MicroBatch]:
        rows = self.layout.positions(step)
        samples = samples_at(rows.ravel(), len(self._sequences), self._seed, self._shuffle)
        return [self._micro_batch(part) for part in np.split(samples, len(rows))]

    def _micro_batch(self, samples: np.ndarray[Any, np.dtype[np.int64]]) -> MicroBatch:
        read = [self._sequences.read(int(sample)) for sample in samples]
        inputs, targets, positions = (
            torch.from_numpy(np.stack(part)) for part in zip(*read, strict=True)
        )
        # Padding follows its example, which causal attention hides from it; positions are those
        # that a model takes by itself.
        return MicroBatch(inputs, targets, positions if self._packing else None)


class SyntheticBatches(_RandomAccess):
    """Synthetic sequences that a model can learn; a function of the seed and global position.

    Each sequence counts up by its own increment and jumps to a random token one time in ten, so a
    trained model predicts nine of ten tokens.
    """

    def __init__(self, layout: Layout, vocab: int, seed: int) -> None:
        super().__init__(layout)
        self._vocab, self._seed = vocab, seed

    def at(self, step: int) -> list[MicroBatch]:
        rows = self.layout.positions(step)
        return [_split(torch.stack([self._sample(int(p)) for p in row])) for row in rows]

    def _sample(self, position: int) -> torch.Tensor:
        # Exported scripts draw the same numbers, with torch alone.
        random = torch.Generator().manual_seed(named_seed(self._seed, f"data/{position}"))
        length = self.layout.seq_len + 1
        increment = torch.randint(1, 9, (1,), generator=random)
        jumps = torch.rand(length, generator=random) < 0.1
        jumps[0] = True
        tokens = torch.randint(self._vocab, (length,), generator=random)
        return torch.where(jumps, tokens, increment).cumsum(0) % self._vocab


class IterableBatches:
    """Micro-batches from the user's own iterable for this rank."""

    statistics: DataStatistics | None = None

    def __init__(self, source: str, layout: Layout) -> None:
        from shardwise.units.build import find_function

        self._source, self.layout = source, layout
        iterable = find_function(source, "data.source")(layout.rank, layout.world)
        self._iterator: Iterator[Any] = iter(iterable)

    def seek(self, step: int, sequence: int) -> None:
        """Skip the batches that were used before; an iterable has no other way."""
        used = sequence // (self.layout.world * self.layout.micro_batch)
        for _ in itertools.islice(self._iterator, used):
            pass
        self.layout = self.layout._replace(first_step=step, first_sequence=sequence)

    def at(self, step: int) -> list[MicroBatch]:
        batches = []
        for _ in range(self.layout.accumulate):
            ids = next(self._iterator, None)
            if ids is None:
                break
            tensor = torch.as_tensor(ids)
            expected = (self.layout.micro_batch, self.layout.seq_len + 1)
            if tuple(tensor.shape) != expected:
                raise SpecError(
                    f"data.source: {self._source} returned a batch of shape "
                    f"{tuple(tensor.shape)}; it must be {expected}: micro_batch sequences of "
                    "seq_len + 1 token ids"
                )
            batches.append(_split(tensor.long()))
        return batches


def make_batches(data: DataSettings, layout: Layout, vocab: int | None, seed: int) -> Batches:
    if data.source is not None:
        return IterableBatches(data.source, layout)
    if data.synthetic:
        return SyntheticBatches(layout, vocab or 256, seed)
    kind = ExampleBatches if is_chat(data, find_files(data.path)) else TokenBatches
    return kind(data, layout, vocab, seed)


def prepare(data: DataSettings, seq_len: int) -> None:
    """Write the cache of `data.path`, so that other processes find it."""
    if is_chat(data, find_files(data.path)):
        Sequences(data, seq_len)
    else:
        tokenized(data)


def _check_vocab(tokenizer_vocab: int, vocab: int | None) -> None:
    if vocab is not None and tokenizer_vocab > vocab:
        raise SpecError(
            f"data.tokenizer: has {tokenizer_vocab:,} tokens but the model has {vocab:,}; set "
            f"model.vocab = {tokenizer_vocab} or use the model's own tokenizer"
        )


def _split(ids: torch.Tensor) -> MicroBatch:
    return MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
