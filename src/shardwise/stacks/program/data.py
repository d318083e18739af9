"""The micro-batches of a rank: tokens of text, made up, or the user's own."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from hashlib import sha256
from itertools import count

import torch

from shardwise.stacks.program.seeds import seed_of
from shardwise.stacks.program.settings import (
    DATA,
    MICRO_BATCH,
    READS_VOCABULARY,
    SEED,
    SEQ_LEN,
    SHUFFLE,
    SOURCE,
    TOKENS,
    VOCAB,
)


class Tokens:
    """Flat files of token ids, mapped and read as if they were one long tensor."""

    def __init__(self) -> None:
        index = json.loads((TOKENS / "index.json").read_text())
        dtype = getattr(torch, index["dtype"])
        self.count = sum(index["tokens"])
        self.shards = [
            torch.from_file(str(TOKENS / f"{number:05}.bin"), size=size, dtype=dtype)
            for number, size in enumerate(index["tokens"])
        ]

    def read(self, start: int, length: int) -> torch.Tensor:
        parts = []
        for tokens in self.shards:
            parts.append(tokens[max(start, 0) : max(start + length, 0)].long())
            start -= len(tokens)
        return torch.cat(parts)


def shuffled(index: int, size: int, key: str) -> int:
    """Apply a permutation of 0..size-1, selected by `key`, to an index.

    A Feistel network permutes numbers below a power of four; an index outside the range is
    permuted again until it is inside (cycle walking).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    digest = sha256(key.encode()).digest() + sha256(f"+{key}".encode()).digest()
    while True:
        left, right = index >> half, index & mask
        for word in struct.unpack("<6Q", digest[:48]):
            value = right ^ word
            value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
            value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
            left, right = right, left ^ ((value ^ (value >> 31)) & mask)
        index = (left << half) | right
        if index < size:
            return index


class Vocabulary:
    """The number of tokens that the model knows, which is read once it is built."""

    size = 0


def sequence(position: int) -> torch.Tensor:
    """Synthetic tokens: count up by a fixed increment, with a random jump one time in ten."""
    vocab = Vocabulary.size if READS_VOCABULARY else VOCAB
    random = torch.Generator().manual_seed(seed_of(f"data/{position}"))
    increment = torch.randint(1, 9, (1,), generator=random)
    jumps = torch.rand(SEQ_LEN + 1, generator=random) < 0.1
    jumps[0] = True
    tokens = torch.randint(vocab, (SEQ_LEN + 1,), generator=random)
    return torch.where(jumps, tokens, increment).cumsum(0) % vocab


def micro_batches(rank: int, world: int) -> Iterator[torch.Tensor]:
    """The micro-batches of one rank: rows of SEQ_LEN + 1 token ids."""
    if DATA == "own":
        for batch in SOURCE(rank, world):
            yield torch.as_tensor(batch).long()
    else:
        if DATA == "tokens":
            # Neighbours share a token: the last target of one is the first input of the next.
            tokens = Tokens()
            size = (tokens.count - 1) // SEQ_LEN
        for number in count():
            first = (number * world + rank) * MICRO_BATCH
            positions = range(first, first + MICRO_BATCH)
            if DATA == "synthetic":
                yield torch.stack([sequence(position) for position in positions])
            elif SHUFFLE:
                rows = [shuffled(p % size, size, f"{SEED}/{p // size}") for p in positions]
                yield torch.stack([tokens.read(row * SEQ_LEN, SEQ_LEN + 1) for row in rows])
            else:
                rows = [p % size for p in positions]
                yield torch.stack([tokens.read(row * SEQ_LEN, SEQ_LEN + 1) for row in rows])
