"""The micro-batches and accumulation steps to try.

With a global batch, accumulation follows from the micro-batch, and the batch of a step may differ
from the requested one by a stated tolerance: 500 sequences on 16 devices are 31.25 each, which
31 × 1 and 8 × 4 both come close to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardwise.predict.configurations import Floats, Ints
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import Job
from shardwise.spec.record import SpecError

# How far a step's batch may be from the requested global batch, as a share of the latter.
BATCH_TOLERANCE = 0.05
# If no batch is exact, all within this share of the request count as equally close.
SAME_BATCH = 0.02
# The largest batch of published dense runs, in tokens (Llama 3 405B, 16 Mi); beyond the critical
# batch size, more tokens per step no longer save steps.
LARGE_BATCH = 2**24
# Without a global batch, batches stay within usual practice. A step has at most 4 Mi tokens: the
# batch of Llama 2, the first of Llama 3, and the most in three of four published measurements
# (measured runs of docs/accuracy.md). A micro-batch has at most 64 Ki tokens, the most in 95 % of
# them, and is a power of two or one and a half times one.
USUAL_BATCH = 2**22
USUAL_MICRO_BATCH = 2**16
LARGEST_MICRO_BATCH = 4096
LARGEST_ACCUMULATION = 2**20
# From this share of a sequence per device on, a batch is rounded up to one sequence per device.
LEAST_SEQUENCES = 0.75


class UnevenBatchError(SpecError):
    """No batch near the global batch divides over the devices; `neighbours` (tokens) would."""

    def __init__(self, job: Job, cluster: ClusterSpec) -> None:
        self.neighbours = neighbours(job, cluster)
        near = " or ".join(f"{tokens:,}" for tokens in self.neighbours)
        super().__init__(
            f"job.global_batch: {job.global_batch:,} tokens do not divide over "
            f"{cluster.devices:,} devices (one sequence of {job.seq_len:,} tokens on each is "
            f"{job.seq_len * cluster.devices:,}); ask for {near}, or use fewer devices"
        )


class Batch(NamedTuple):
    """Micro-batch in sequences per device, accumulation steps, and deviation from the request."""

    micro_batch: int
    accumulate: int
    # |tokens per step / requested tokens - 1|; 0 without a requested global batch.
    deviation: float = 0.0


def sequences_wanted(job: Job, cluster: ClusterSpec) -> float | None:
    """Sequences per device and step in the global batch, not rounded; None without one."""
    if job.global_batch is None:
        return None
    return job.global_batch / (job.seq_len * cluster.devices)


def distance(sequences: Floats | Ints, groups: Ints | int, job: Job) -> Floats:
    """Relative distance of batches from the requested one: |sequences / requested - 1|.

    0 without a request, and within SAME_BATCH if no exact batch is possible. `sequences` is per
    data-parallel rank and step, `groups` the number of data-parallel ranks.
    """
    if job.global_batch is None:
        return np.zeros(len(sequences))
    wanted = job.global_batch / (job.seq_len * np.asarray(groups))
    away = np.abs(sequences / wanted - 1)
    exact = wanted == np.round(wanted)
    return np.where(~exact & (away <= SAME_BATCH), 0.0, away)


def batches(
    job: Job,
    cluster: ClusterSpec,
    micro_batches: Sequence[int] | None = None,
    tolerance: float = BATCH_TOLERANCE,
) -> list[Batch]:
    """Every micro-batch to try, with the accumulation that comes closest to the global batch.

    Only batches within the tolerance are kept; a tolerance of 0 keeps the exact ones. Raises
    UnevenBatchError if there are none, and SpecError if devices get less than one sequence.
    """
    wanted = sequences_wanted(job, cluster)
    if micro_batches is not None:
        # An example is not divided.
        micro_batches = [-(-size // job.example) * job.example for size in micro_batches]
    if wanted is None:
        return [Batch(size, 1) for size in micro_batches or usual_sizes(job, cluster)]
    if wanted < LEAST_SEQUENCES:
        least = job.seq_len * cluster.devices
        most = (job.global_batch or 0) // job.seq_len
        if not most:
            raise SpecError(
                f"job.global_batch: {job.global_batch:,} tokens are fewer than one sequence of "
                f"{job.seq_len:,}; raise it or shorten the sequences"
            )
        raise SpecError(
            f"job.global_batch: {job.global_batch:,} tokens are fewer than one sequence on every "
            f"device ({least:,}); raise it, shorten the sequences, or use at most {most:,} devices "
            "at one sequence each: tensor and context parallelism cannot divide this model further"
        )
    largest = min(math.ceil(wanted * (1 + tolerance)), LARGEST_MICRO_BATCH)
    sizes = micro_batches or range(job.example, largest + 1, job.example)
    found = [_closest_batch(size, wanted) for size in sizes]
    found = [batch for batch in found if batch.accumulate <= LARGEST_ACCUMULATION]
    if not found:
        raise SpecError(
            f"job.global_batch: {job.global_batch:,} tokens take more than "
            f"{LARGEST_ACCUMULATION:,} micro-batches of {max(sizes):,} sequences; lower it"
        )
    closest = min(batch.deviation for batch in found)
    if closest > tolerance + 1e-9:
        raise UnevenBatchError(job, cluster)
    return [batch for batch in found if batch.deviation <= tolerance + 1e-9]


def usual_sizes(job: Job, cluster: ClusterSpec) -> list[int]:
    """The micro-batches to try without a requested batch, in sequences per device."""
    tokens = min(USUAL_MICRO_BATCH, USUAL_BATCH // cluster.devices)
    most = min(tokens // job.seq_len, LARGEST_MICRO_BATCH)
    step = job.example
    return [size for size in range(step, most + 1, step) if is_round(size)] or [step]


def is_round(size: int) -> bool:
    """Whether a number is a power of two, or one and a half times one."""
    odd = size // (size & -size)
    return odd in (1, 3)


def _closest_batch(size: int, wanted: float) -> Batch:
    """The batch of a micro-batch whose accumulation comes closest to `wanted` sequences."""
    steps = max(1, math.floor(wanted / size + 0.5))
    return Batch(size, steps, abs(size * steps / wanted - 1))


def neighbours(job: Job, cluster: ClusterSpec) -> tuple[int, ...]:
    """The batches in tokens next to the global batch that divide evenly; empty without one."""
    wanted = sequences_wanted(job, cluster)
    if wanted is None:
        return ()
    least = job.seq_len * cluster.devices
    near = (math.floor(wanted) * least, math.ceil(wanted) * least)
    return tuple(dict.fromkeys(tokens for tokens in near if tokens))


def coarse_batches(sizes: Sequence[Batch], asked: bool) -> list[Batch]:
    """A few batches to search first: two per doubling of the micro-batch, the closest and roundest.

    If a global batch was `asked` for, the batches closest to it are always included.
    """
    closest = min(size.deviation for size in sizes)
    kept = {size for size in sizes if asked and size.deviation <= closest + 1e-9}
    best: dict[int, Batch] = {}
    for size in sizes:
        half_octave = int(2 * math.log2(size.micro_batch))
        other = best.get(half_octave)
        if other is None or _batch_rank(size) < _batch_rank(other):
            best[half_octave] = size
    return sorted(kept | set(best.values()))


def batches_between(sizes: Sequence[Batch], low: int, high: int, most: int) -> list[Batch]:
    """At most `most` batches with a micro-batch between `low` and `high`, the best rank first."""
    inside = [size for size in sizes if low < size.micro_batch < high]
    return sorted(inside, key=_batch_rank)[:most]


def _batch_rank(size: Batch) -> tuple[float, int, int]:
    """Sort key of batches: close to the request, divisible by a high power of two, small."""
    power = size.micro_batch & -size.micro_batch
    return round(size.deviation, 2), -power, size.micro_batch
