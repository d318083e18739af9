"""Decide once which chat examples each sequence holds, and keep that on disk.

Sequences depend on the files and on seq_len only, never on the seed or the number of processes. So
the sequence at a position is found as it is for text: one integer is the state of the data.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.engine.head_with_loss import IGNORED
from shardwise.spec.record import SpecError
from shardwise.spec.train import DataSettings
from shardwise.trainer.data.examples import (
    COUNTS,
    ID,
    example_starts,
    examples_folder,
    tokenized_examples,
)
from shardwise.trainer.data.shards import INDEX, Tokens, TokenShards, write_shards

Integers = npt.NDArray[np.int64]
# Examples are packed with others of the same window, so that memory does not grow with the data.
WINDOW_TOKENS = 2**22
PADDING = 0


class DataStatistics(NamedTuple):
    """Lengths of chat examples, in tokens, and how they fill sequences.

    `median`, `p95` and `longest` are lengths before examples are cut to seq_len. `cut` and
    `dropped` count examples. `loss_tokens` are the tokens that count for the loss after the cut.
    `filled` is the share (0 to 1) of positions that are not padding.
    """

    examples: int
    tokens: int
    loss_tokens: int
    median: int
    p95: int
    longest: int
    cut: int
    # Examples without a token that counts: they have no answer, or it begins after the cut.
    dropped: int
    sequences: int
    seq_len: int
    filled: float
    packing: bool

    @property
    def loss_share(self) -> float:
        """The share (0 to 1) of all positions, padding included, that count for the loss."""
        return self.loss_tokens / (self.sequences * self.seq_len)


class Sequences:
    """Sequences of `seq_len` inputs with their targets and positions, read from the cache.

    An example of n tokens takes n - 1 positions: its last token is only a target.
    """

    def __init__(self, data: DataSettings, seq_len: int) -> None:
        self._seq_len = seq_len
        self._examples = tokenized_examples(data)
        folder = examples_folder(data)
        folder = folder.with_name(
            f"{folder.name}-{'packed' if data.packing else 'padded'}-{seq_len}"
        )
        if not (folder / "ends" / INDEX).exists():
            _write_plan(folder, self._examples, seq_len, data.packing)
        self._pieces, self._ends = TokenShards(folder / "pieces"), TokenShards(folder / "ends")
        self.vocab = int(self._examples.about["vocab"])
        self.statistics = DataStatistics(**self._ends.about["statistics"])
        if not len(self._ends):
            raise SpecError(
                f"data.path: none of {self.statistics.dropped:,} examples has an answer within "
                f'{seq_len:,} tokens; increase job.seq_len or set data.loss_on = "all"'
            )

    def __len__(self) -> int:
        return len(self._ends)

    def read(self, number: int) -> tuple[Integers, Integers, Integers]:
        """Inputs, targets and positions of sequence `number`; targets of padding are IGNORED."""
        inputs = np.full(self._seq_len, PADDING, dtype=np.int64)
        targets = np.full(self._seq_len, IGNORED, dtype=np.int64)
        positions = np.empty(self._seq_len, dtype=np.int64)
        filled = 0
        for start, length in self._pieces_of(number):
            tokens = self._examples.read(start, length)
            here = slice(filled, filled + length - 1)
            inputs[here] = tokens[:-1] & ID
            targets[here] = np.where(tokens[1:] & COUNTS, tokens[1:] & ID, IGNORED)
            positions[here] = np.arange(length - 1)
            filled += length - 1
        # Padding begins at 0 as well: it is an example of its own.
        positions[filled:] = np.arange(self._seq_len - filled)
        return inputs, targets, positions

    def _pieces_of(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield (start, length) of each example in sequence `number`, in tokens."""
        first = int(self._ends.read(number - 1, 1)[0]) if number else 0
        count = int(self._ends.read(number, 1)[0]) - first
        pieces = self._pieces.read(2 * first, 2 * count).reshape(-1, 2)
        yield from ((int(start), int(length)) for start, length in pieces)


def best_fit(lengths: Integers, room: int) -> list[list[int]]:
    """Groups of indices whose lengths sum to at most `room`, by best-fit decreasing packing.

    The longest comes first; each joins the group in which it leaves the least room. Both the groups
    and the indices of each are in the order of the indices.
    """
    groups: list[list[int]] = []
    # Groups by the room they have left, and the rooms that occur.
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        at = bisect_left(rooms, length)
        if at < len(rooms):
            left = rooms[at]
            group = by_room[left].pop()
            if not by_room[left]:
                rooms.pop(at)
            groups[group].append(index)
        else:
            left, group = room, len(groups)
            groups.append([index])
        left -= length
        if not by_room.setdefault(left, []):
            insort(rooms, left)
        by_room[left].append(group)
    return sorted(sorted(group) for group in groups)


class _Totals:
    """Sums over all windows of examples, from which the statistics are computed."""

    def __init__(self) -> None:
        self.loss_tokens = self.cut = self.dropped = self.filled = 0
        # How many examples each sequence has.
        self.counts: list[Integers] = []


def _write_plan(folder: Path, examples: TokenShards, seq_len: int, packing: bool) -> None:
    """Write which examples each sequence holds, and the statistics, into `folder`."""
    starts = example_starts(examples)
    lengths = np.diff(starts, append=len(examples))
    totals = _Totals()
    write_shards(folder / "pieces", _pieces(examples, starts, seq_len, packing, totals), {})
    counts = np.concatenate([np.zeros(0, np.int64), *totals.counts])
    positions = len(counts) * seq_len
    median, p95 = np.percentile(lengths, (50, 95), method="inverted_cdf").tolist()
    statistics = DataStatistics(
        examples=len(starts), tokens=len(examples), loss_tokens=totals.loss_tokens,
        median=median, p95=p95, longest=int(lengths.max()), cut=totals.cut, dropped=totals.dropped,
        sequences=len(counts), seq_len=seq_len, packing=packing,
        filled=totals.filled / positions if positions else 0.0,
    )  # fmt: skip
    ends = np.cumsum(counts).astype(np.uint64)
    write_shards(folder / "ends", [ends], {"statistics": statistics._asdict()})


def _pieces(
    examples: TokenShards, starts: Integers, seq_len: int, packing: bool, totals: _Totals
) -> Iterator[Tokens]:
    """Yield start and length of every example that is trained on, in the order of sequences.

    Each array is flat (start, length, start, length, …), for one window. Adds to `totals`.
    """
    limits = np.append(starts, len(examples))
    for first, last in _windows(starts):
        begins, lengths = starts[first:last], np.diff(limits[first : last + 1])
        offset = int(limits[first])
        counts = (examples.read(offset, int(limits[last]) - offset) & COUNTS) != 0
        sums = np.concatenate([[0], np.cumsum(counts)])
        kept = np.minimum(lengths, seq_len + 1)
        counted = sums[begins - offset + kept] - sums[begins - offset]
        used = np.flatnonzero(counted)
        begins, kept = begins[used], kept[used]
        groups = best_fit(kept - 1, seq_len) if packing else [[i] for i in range(len(used))]
        totals.loss_tokens += int(counted.sum())
        totals.cut += int((lengths[used] > seq_len + 1).sum())
        totals.dropped += len(lengths) - len(used)
        totals.filled += int((kept - 1).sum())
        totals.counts.append(np.asarray([len(group) for group in groups], dtype=np.int64))
        order = np.asarray([index for group in groups for index in group], dtype=np.int64)
        yield np.stack([begins[order], kept[order]], axis=1).astype(np.uint64).ravel()


def _windows(starts: Integers) -> Iterator[tuple[int, int]]:
    """Yield (first, end) index ranges of examples that begin within WINDOW_TOKENS tokens."""
    first = 0
    while first < len(starts):
        last = int(np.searchsorted(starts, starts[first] + WINDOW_TOKENS))
        yield first, last
        first = last
