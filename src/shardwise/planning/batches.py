"""The micro-batches and accumulation steps that make a step's batch.

Every micro-batch is a choice. With a global batch, accumulation follows from it, and a step may
differ from what was asked by a stated tolerance: 500 sequences on 16 devices are 31.25 each, which
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

# How far a step may be from the global batch that was asked for, as a share of it.
BATCH_TOLERANCE = 0.05
# Where no batch is exact, those so close to it count as equally close.
SAME_BATCH = 0.02
# Without a global batch, micro-batches stop where a step has this many tokens: the largest batch
# Llama 3 405B was trained with (16 Mi). Published dense runs use 0.5 to 16 million tokens; beyond
# the critical batch size, more tokens per step no longer save steps.
LARGE_BATCH = 2**24
LARGEST_MICRO_BATCH = 4096
LARGEST_ACCUMULATION = 2**20
# The least share of one sequence per device that is rounded up to one.
LEAST_SEQUENCES = 0.75


class Batch(NamedTuple):
    """Sequences per device at a time, how often per step, and the distance from what was asked."""

    micro_batch: int
    accumulate: int
    # |tokens per step / tokens asked for - 1|; 0 where nothing was asked for.
    deviation: float = 0.0


def sequences_wanted(job: Job, cluster: ClusterSpec) -> float | None:
    """Sequences per device and step that make the global batch; None where none is given."""
    if job.global_batch is None:
        return None
    return job.global_batch / (job.seq_len * cluster.devices)


def distance(sequences: Floats | Ints, groups: Ints | int, job: Job) -> Floats:
    """How far batches are from the one wanted, as a share of it: 0 counts as what was asked for.

    `sequences` are those of each of so many `groups` that see different ones.
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
    """Every micro-batch, with the accumulation that comes closest to the global batch.

    Those within the tolerance are kept; where none is, the closest are. With a tolerance of 0, only
    exact ones are, and SpecError says which batches would be.
    """
    wanted = sequences_wanted(job, cluster)
    if wanted is None:
        sizes = micro_batches or range(1, _without_global_batch(job, cluster) + 1)
        return [Batch(size, 1) for size in sizes]
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
    found = [_closest(size, wanted) for size in micro_batches or range(1, largest + 1)]
    found = [batch for batch in found if batch.accumulate <= LARGEST_ACCUMULATION]
    closest = min(batch.deviation for batch in found)
    if tolerance == 0 and closest > 1e-9:
        raise _not_exact(job, cluster)
    return [batch for batch in found if batch.deviation <= max(tolerance, closest) + 1e-9]


def _without_global_batch(job: Job, cluster: ClusterSpec) -> int:
    """The largest micro-batch of a step that is not too large."""
    most = LARGE_BATCH // (job.seq_len * cluster.devices)
    return max(1, min(most, LARGEST_MICRO_BATCH))


def _closest(size: int, wanted: float) -> Batch:
    steps = max(1, math.floor(wanted / size + 0.5))
    return Batch(size, steps, abs(size * steps / wanted - 1))


def neighbours(job: Job, cluster: ClusterSpec) -> tuple[int, ...]:
    """The batches in tokens next to the global batch that divide evenly; none without one."""
    wanted = sequences_wanted(job, cluster)
    if wanted is None:
        return ()
    least = job.seq_len * cluster.devices
    near = (math.floor(wanted) * least, math.ceil(wanted) * least)
    return tuple(dict.fromkeys(tokens for tokens in near if tokens))


def _not_exact(job: Job, cluster: ClusterSpec) -> SpecError:
    least = job.seq_len * cluster.devices
    near = " or ".join(f"{tokens:,}" for tokens in neighbours(job, cluster))
    return SpecError(
        f"job.global_batch: {job.global_batch:,} tokens are no multiple of {least:,} (one sequence "
        f"of {job.seq_len:,} tokens on each of {cluster.devices:,} devices); ask for {near}, or "
        "allow nearby batches"
    )


def coarse(sizes: Sequence[Batch], asked: bool) -> list[Batch]:
    """A few batches to search first: two per doubling of the micro-batch, the closest and roundest.

    Where a global batch is `asked` for, every micro-batch that divides it is among them.
    """
    closest = min(size.deviation for size in sizes)
    kept = {size for size in sizes if asked and size.deviation <= closest + 1e-9}
    best: dict[int, Batch] = {}
    for size in sizes:
        half_octave = int(2 * math.log2(size.micro_batch))
        other = best.get(half_octave)
        if other is None or _rank(size) < _rank(other):
            best[half_octave] = size
    return sorted(kept | set(best.values()))


def between(sizes: Sequence[Batch], low: int, high: int, most: int) -> list[Batch]:
    """At most so many batches whose micro-batch lies between two, the roundest first."""
    inside = [size for size in sizes if low < size.micro_batch < high]
    return sorted(inside, key=_rank)[:most]


def _rank(size: Batch) -> tuple[float, int, int]:
    """Close to what was asked, then divisible by a high power of two, then small."""
    power = size.micro_batch & -size.micro_batch
    return round(size.deviation, 2), -power, size.micro_batch
