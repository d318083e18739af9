"""What DDP's communication hooks send, hold and copy to average one bucket of gradients.

`bf16` and `fp16` average a copy of the bucket in 16 bits. PowerSGD averages what it does not
compress, then the first and then the second factors of all matrices: three all-reduces per bucket.
It keeps the error of each bucket and the factors, and copies the bucket to compute the new error.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from shardwise.spec.compression import is_compressed

# How often the hook of PowerSGD reads or writes a bucket: it adds the old error (3) and copies (2),
# multiplies twice and writes the product (3), and subtracts that to get the new error (3). What is
# not compressed is copied to a message and back (4).
_PASSES, _UNCOMPRESSED_PASSES = 11.0, 4.0


class Bucket(NamedTuple):
    """One DDP bucket: the shapes of its gradients, in the order in which they arrive."""

    shapes: tuple[tuple[int, int], ...]

    @property
    def elements(self) -> int:
        return sum(rows * columns for rows, columns in self.shapes)


class Factors(NamedTuple):
    """Elements that PowerSGD averages for one bucket: not compressed, first and second factors."""

    uncompressed: int
    first: int
    second: int


@lru_cache(maxsize=4096)
def factors(bucket: Bucket, rank: int) -> Factors:
    """The elements that PowerSGD of this rank averages for a bucket."""
    uncompressed = first = second = 0
    for rows, columns in bucket.shapes:
        if is_compressed(rows, columns, rank):
            low = min(rows, columns, rank)
            first, second = first + rows * low, second + columns * low
        else:
            uncompressed += rows * columns
    return Factors(uncompressed, first, second)


class Compression(NamedTuple):
    """How gradients of `itemsize` bytes are averaged: by PowerSGD of a rank, or with fewer bytes.

    With a `rank` of 0 and `wire_bytes` equal to `itemsize`, they are not compressed.
    """

    itemsize: int
    wire_bytes: int
    rank: int

    @property
    def is_used(self) -> bool:
        return self.rank > 0 or self.wire_bytes < self.itemsize

    def messages(self, bucket: Bucket) -> tuple[int, ...]:
        """Bytes of each all-reduce of a bucket."""
        if self.rank:
            return tuple(elements * self.itemsize for elements in factors(bucket, self.rank))
        return (bucket.elements * self.wire_bytes,)

    def kept_bytes(self, bucket: Bucket) -> int:
        """Bytes that stay allocated from step to step."""
        if not self.rank:
            return 0
        _, first, second = factors(bucket, self.rank)
        return (bucket.elements + first + second) * self.itemsize

    def working_bytes(self, bucket: Bucket) -> int:
        """Bytes that are allocated while a bucket is averaged; 0 without compression."""
        if self.rank:
            # A copy of the gradients, the new error beside the old one, and a message.
            held = 2 * bucket.elements + factors(bucket, self.rank).uncompressed
            return held * self.itemsize
        return bucket.elements * self.wire_bytes if self.is_used else 0

    def copied_bytes(self, bucket: Bucket) -> float:
        """Bytes that a device reads and writes to compress a bucket and to decompress it."""
        if self.rank:
            passes = _PASSES * bucket.elements
            passes += _UNCOMPRESSED_PASSES * factors(bucket, self.rank).uncompressed
            return passes * self.itemsize
        return 2.0 * bucket.elements * (self.itemsize + self.wire_bytes) if self.is_used else 0.0
