"""The micro-batches of one rank at one step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from shardwise.engine.head_with_loss import IGNORED
from shardwise.engine.materialize import named_seed
from shardwise.spec.record import SpecError
from shardwise.spec.train import DataSettings
from shardwise.trainer.data.chat import is_chat
from shardwise.trainer.data.order import samples_at
from shardwise.trainer.data.packing import DataStatistics, Sequences
from shardwise.trainer.data.tokenize import find_files, tokenized


class MicroBatch(NamedTuple):
    """Token ids and, for each position, the next token id as its target.

    `positions` count from 0 in each packed example; None if a sequence is one example.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        """The number of targets that count for the loss."""
        return int((self.targets != IGNORED).sum())

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch(
            self.inputs.to(device, non_blocking=True),
            self.targets.to(device, non_blocking=True),
            None if self.positions is None else self.positions.to(device, non_blocking=True),
        )


class Layout(NamedTuple):
    """How the sequences of a step are distributed over ranks and micro-batches.

    `rank` and `world` count ranks that have different sequences, `accumulate` this rank's
    micro-batches.
    """

    rank: int
    world: int
    micro_batch: int
    accumulate: int
    seq_len: int
    # Where a resumed run continues: completed steps, and sequences that all ranks have used.
    first_step: int = 0
    first_sequence: int = 0
    # Micro-batches of each rank in a step, if they differ.
    counts: tuple[int, ...] = ()

    @property
    def fewer(self) -> int:
        """Micro-batches by which this rank has fewer in a step than the rank with the most."""
        return max(self.counts) - self.accumulate if self.counts else 0

    @property
    def sequences_per_step(self) -> int:
        """Sequences that all ranks together use in one step."""
        return self.micro_batch * (sum(self.counts) or self.world * self.accumulate)

    def sequences_before(self, step: int) -> int:
        """Sequences that all ranks together have used after `step` completed steps."""
        return self.first_sequence + (step - self.first_step) * self.sequences_per_step

    def positions(self, step: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Global positions of this rank's sequences of a step: (accumulate, micro_batch)."""
        counts = np.asarray(self.counts or (self.accumulate,) * self.world, dtype=np.int64)
        # Ranks take micro-batches in rounds, each as long as it has any left.
        rounds = np.arange(self.accumulate)[:, None]
        taken = np.minimum(counts, rounds).sum(axis=1) + (counts[: self.rank] > rounds).sum(axis=1)
        first = self.sequences_before(step) + taken * self.micro_batch
        found: np.ndarray[Any, np.dtype[np.int64]] = first[:, None] + np.arange(self.micro_batch)
        return found


class Batches(Protocol):
    """The source of micro-batches of one rank."""

    layout: Layout
    # None unless the data are chat examples.
    statistics: DataStatistics | None

    @property
    def count(self) -> int | None:
        """Sequences of one epoch; None if the data has no known end."""
        ...

    def seek(self, step: int, sequence: int) -> None:
        """Move to the data after `step` steps, in which all ranks used `sequence` sequences."""
        ...

    def at(self, step: int) -> list[MicroBatch]:
        """This rank's micro-batches after `step` completed steps; fewer once the data has ended."""
        ...


class _RandomAccess:
    """Base of micro-batches that can be computed for any step, so that seeking is free."""

    count: int | None = None
    statistics: DataStatistics | None = None

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def seek(self, step: int, sequence: int) -> None:
        self.layout = self.layout._replace(first_step=step, first_sequence=sequence)


class TokenBatches(_RandomAccess):
    """Micro-batches of tokenized files.

    The order of sequences does not depend on the number of ranks.
    """

    count: int

    def __init__(
        self,
        data: DataSettings,
        layout: Layout,
        vocab: int | None,
        seed: int,
        keep_rest: bool = False,
    ) -> None:
        """With `keep_rest`, tokens after the last full sequence are a padded one."""
        super().__init__(layout)
        self._tokens = tokenized(data)
        self._seed, self._shuffle = seed, data.shuffle
        # Adjacent sequences share a token: the last target of one is the next one's first input.
        targets = len(self._tokens) - 1
        self.count = -(-targets // layout.seq_len) if keep_rest else targets // layout.seq_len
        if self.count < 1:
            raise SpecError(
                f"data.path: has {len(self._tokens):,} tokens, less than one sequence of "
                f"{layout.seq_len:,}; reduce job.seq_len or add more text"
            )
        _check_vocab(int(self._tokens.about["vocab"]), vocab)

    def at(self, step: int) -> list[MicroBatch]:
        rows = self.layout.positions(step)
        samples = samples_at(rows.ravel(), self.count, self._seed, self._shuffle)
        tokens = [self._read(int(sample)) for sample in samples]
        return [
            _with_targets(torch.from_numpy(part)) for part in np.split(np.stack(tokens), len(rows))
        ]

    def _read(self, sample: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The seq_len + 1 token ids of a sequence; IGNORED after the last token of the files."""
        start, length = sample * self.layout.seq_len, self.layout.seq_len + 1
        there = min(length, len(self._tokens) - start)
        ids = self._tokens.read(start, there)
        return ids if there == length else np.pad(ids, (0, length - there), constant_values=IGNORED)


class ExampleBatches(_RandomAccess):
    """Micro-batches of chat examples, packed or padded.

    The order of sequences does not depend on the number of ranks.
    """

    def __init__(self, data: DataSettings, layout: Layout, vocab: int | None, seed: int) -> None:
        super().__init__(layout)
        self._sequences = Sequences(data, layout.seq_len)
        self.count = len(self._sequences)
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
        # Padding follows its example, so causal attention never sees it. Without packing, a model's
        # default positions are right.
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
        return [_with_targets(torch.stack([self._sample(int(p)) for p in row])) for row in rows]

    def _sample(self, position: int) -> torch.Tensor:
        """The seq_len + 1 token ids of the sequence at a global position."""
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

    count: int | None = None
    statistics: DataStatistics | None = None

    def __init__(self, source: str, layout: Layout) -> None:
        from shardwise.pytorch.build import find_function

        self._source, self.layout = source, layout
        iterable = find_function(source, "data.source")(layout.rank, layout.world)
        self._iterator: Iterator[Any] = iter(iterable)

    def seek(self, step: int, sequence: int) -> None:
        """Skip the batches that were used before, by reading them: an iterable cannot jump."""
        used = sequence * self.layout.accumulate // self.layout.sequences_per_step
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
            batches.append(_with_targets(tensor.long()))
        # Ranks with unequal shares cannot agree on a part of a step.
        ended = len(batches) < self.layout.accumulate and self.layout.counts
        return [] if ended else batches


def make_batches(
    data: DataSettings, layout: Layout, vocab: int | None, seed: int, *, keep_rest: bool = False
) -> Batches:
    """The micro-batches of `data`: an iterable, synthetic, chat or text.

    `vocab` is the size of the model's vocabulary; None if unknown. With `keep_rest`, text is read
    to its last token, and its last sequence is padded.
    """
    if data.source is not None:
        return IterableBatches(data.source, layout)
    if data.synthetic:
        return SyntheticBatches(layout, vocab or 256, seed)
    if is_chat(data, find_files(data.path)):
        return ExampleBatches(data, layout, vocab, seed)
    return TokenBatches(data, layout, vocab, seed, keep_rest)


def tokenize_data(data: DataSettings, seq_len: int) -> None:
    """Tokenize `data.path` into the cache, so that other processes only read it."""
    if is_chat(data, find_files(data.path)):
        Sequences(data, seq_len)
    else:
        tokenized(data)


def _check_vocab(tokenizer_vocab: int, vocab: int | None) -> None:
    """Raise SpecError if the tokenizer has more tokens than the model."""
    if vocab is not None and tokenizer_vocab > vocab:
        raise SpecError(
            f"data.tokenizer: has {tokenizer_vocab:,} tokens but the model has {vocab:,}; set "
            f"model.vocab = {tokenizer_vocab} or use the model's own tokenizer"
        )


def _with_targets(ids: torch.Tensor) -> MicroBatch:
    """A micro-batch of rows with seq_len + 1 token ids: targets are the inputs shifted by one.

    Rows may end in IGNORED: as an input, that is token 0.
    """
    return MicroBatch(ids[:, :-1].clamp(min=0), ids[:, 1:].contiguous())
