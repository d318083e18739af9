"""The order of samples, as a function of seed, epoch and global position.

Any process can compute the sample at any position, without a table that grows with the data and
without knowing the number of processes. So the state of the data is one integer.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
_ROUNDS = 6


def samples_at(positions: Positions, count: int, seed: int, shuffle: bool = True) -> Positions:
    """Indices (0 to `count` - 1) of the samples at global `positions`.

    Every epoch is a new permutation, unless `shuffle` is false.
    """
    epochs, offsets = np.divmod(positions, count)
    if not shuffle:
        return offsets
    samples = np.empty_like(offsets)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        samples[here] = permute(offsets[here], count, f"{seed}/{epoch}")
    return samples


def permute(indices: Positions, count: int, key: str) -> Positions:
    """Apply a permutation of 0..count-1, selected by `key`, to some indices.

    A Feistel network permutes numbers of an even number of bits; values outside the range are
    permuted again until they are in it (cycle walking).
    """
    half = np.uint64(max(1, (int(count - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    digest = hashlib.sha256(key.encode()).digest() + hashlib.sha256(b"+" + key.encode()).digest()
    keys = np.frombuffer(digest, dtype="<u8")[:_ROUNDS]
    values = indices.astype(np.uint64)
    walking = np.ones(len(values), dtype=np.bool_)
    while walking.any():
        left, right = values[walking] >> half, values[walking] & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        values[walking] = (left << half) | right
        walking = values >= np.uint64(count)
    return values.astype(np.int64)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hash 64-bit integers, so that every bit of the input changes half of the output."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
