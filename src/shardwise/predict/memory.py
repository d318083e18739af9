"""Read the memory of a step from its program: bytes on one device, by term and by phase.

The peak is a maximum over phases, never one formula: which phase sets it changes with the batch,
the vocabulary and the strategy. Memory changes by the same amount in each repetition of a body, so
the first or the last of them is the largest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwise.predict.configurations import Bools, Configurations, Floats
from shardwise.predict.program.events import (
    PHASES,
    TERMS,
    Alloc,
    Instant,
    Phase,
    Program,
    Repeat,
    Run,
    Wait,
)
from shardwise.predict.program.sizes import Sizes
from shardwise.predict.program.step import Steps, emit_steps
from shardwise.spec.optimizer import Optimizer
from shardwise.units.unit import ModelUnits

BytesByTerm = dict[str, Floats]
# A search needs only the peak, and how many bytes of it are gradients.
_ALL_TERMS = {term: term for term in TERMS}
_GRADIENTS_APART = {term: "gradients" if term == "gradients" else "other" for term in TERMS}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device at the largest moment of each phase, one column per configuration."""

    # By phase and memory term.
    phases: dict[str, BytesByTerm]
    host_bytes: Floats
    # Whether gradients are reduce-scattered and parameters gathered on separate streams, and the
    # bytes of the largest gather.
    streams: Bools
    gather_bytes: Floats
    # Bytes of all gradients as DDP rounds them before it sends them; 0 if it does not.
    rounded_bytes: Floats

    @property
    def totals(self) -> Floats:
        """Bytes of each phase: one row per phase, in the order of `phases`."""
        return np.stack([sum_terms(ledger) for ledger in self.phases.values()])

    @property
    def peak_bytes(self) -> Floats:
        peak: Floats = self.totals.max(axis=0)
        return peak

    @property
    def pooled_bytes(self) -> Floats:
        """Bytes beyond the peak that the caching allocator keeps in pools of other streams.

        torch's caching allocator has a pool per stream and does not share memory between pools.
        Sharded gradients lie in the pool of the reduce-scatter stream, gathered buffers in that of
        the all-gather stream. Pools do not shrink when their tensors are freed.
        """
        gradients = np.stack([ledger["gradients"] for ledger in self.phases.values()])
        apart = (self.totals - gradients).max(axis=0) + gradients.max(axis=0)
        pooled: Floats = np.where(self.streams, apart + self.gather_bytes - self.peak_bytes, 0.0)
        return pooled + self._unsent_bytes

    @property
    def _unsent_bytes(self) -> Floats:
        """Bytes beyond the peak if rounded gradients wait for the network until all are computed.

        The host does not wait for them, so each copy is alive until it has been sent.
        """
        ledgers = [self.phases[phase] for phase in PHASES if phase.endswith(" backward")]
        backward = np.maximum.reduce([sum_terms(ledger) for ledger in ledgers[1:]])
        unsent: Floats = np.maximum(0.0, backward + self.rounded_bytes - self.peak_bytes)
        return np.where(self.rounded_bytes > 0, unsent, 0.0)

    def peak_phase(self, row: int = 0) -> str:
        return list(self.phases)[int(self.totals[:, row].argmax())]

    def terms_at_peak(self, row: int = 0) -> dict[str, float]:
        ledger = self.phases[self.peak_phase(row)]
        return {term: float(ledger[term][row]) for term in TERMS}


def predict_memory(
    units: ModelUnits, c: Configurations, optimizer: Optimizer = "adamw", *, by_term: bool = True
) -> Memory:
    """Memory of one step on one device, for each configuration.

    Only tensors are counted, not the workspace of kernels or communication libraries: NCCL's
    buffers lie outside torch's allocator, Gloo copies on its own threads. Without `by_term`, the
    terms are only "gradients" and "other".
    """
    return memory_of(emit_steps(units, c, optimizer), by_term=by_term)


def memory_of(steps: Steps, *, by_term: bool = True) -> Memory:
    """Memory of one step on one device, for each configuration of already emitted programs."""
    units, c = steps.units, steps.c
    lines = _ALL_TERMS if by_term else _GRADIENTS_APART
    found: Floats = np.empty((len(PHASES), len(set(lines.values())), len(c)))
    for part in steps.parts:
        found[:, :, part.rows] = peaks(part.program, len(part.rows), lines)
    names = list(dict.fromkeys(lines.values()))
    sizes = Sizes(units, c, steps.optimizer)
    kinds = {id(unit): unit for unit in units.units}.values()
    largest = np.maximum.reduce([sizes.gathered_bytes(unit) for unit in kinds])
    rounded = sizes.gradient_bytes / c.master_bytes * c.wire_bytes
    return Memory(
        phases={
            phase: dict(zip(names, ledger, strict=True))
            for phase, ledger in zip(PHASES, found, strict=True)
        },
        host_bytes=sizes.host_state_bytes
        + sizes.host_activation_bytes
        + np.where(c.offload, sizes.reference_bytes, 0.0),
        streams=c.sharded & (c.shard > 1),
        gather_bytes=largest,
        rounded_bytes=np.where(c.ddp & (c.replicate > 1), rounded, 0.0),
    )


def sum_terms(ledger: BytesByTerm) -> Floats:
    """Bytes of all terms of a ledger together, by configuration."""
    total: Floats = np.sum(list(ledger.values()), axis=0)
    return total


def peaks(program: Program, rows: int, lines: dict[str, str] = _ALL_TERMS) -> Floats:
    """Bytes at the largest instant of each phase, as an array (phases, lines, rows).

    `lines` maps each memory term to the line of the result it is added to.
    """
    names = list(dict.fromkeys(lines.values()))
    line = {term: names.index(name) for term, name in lines.items()}
    fold = _Fold(line, np.zeros((len(names), rows)))
    fold.read(program)
    return np.stack([fold.best[phase].ledger for phase in PHASES])


class _LargestInstant(NamedTuple):
    """The largest instant of a phase so far: bytes in total, and by line and row."""

    total: Floats
    ledger: Floats


class _Fold:
    """Accumulates bytes alive while a program is read, and the largest instant of each phase."""

    def __init__(self, line: dict[str, int], now: Floats, phase: str = "forward") -> None:
        self.line, self.now, self.phase = line, now, phase
        self.best: dict[str, _LargestInstant] = {}

    def read(self, program: Program) -> None:
        for event in program:
            if isinstance(event, Alloc):
                self.now[self.line[event.term]] += event.bytes
            elif isinstance(event, Instant):
                alive = self.now.copy()
                for term, size in event.also:
                    alive[self.line[term]] += size
                self._compare_with_largest(self.phase, alive, alive.sum(axis=0))
            elif isinstance(event, Repeat):
                self._repeat(event)
            elif isinstance(event, Phase):
                self.phase = event.name
            else:
                assert isinstance(event, (Run, Wait))

    def _repeat(self, event: Repeat) -> None:
        body = _Fold(self.line, np.zeros_like(self.now), self.phase)
        body.read(event.body)
        self.phase = body.phase
        # The last repetition is the largest if each leaves more memory allocated than before.
        grows = body.now.sum(axis=0) > 0
        base = self.now + body.now * np.where(grows, np.maximum(event.times - 1, 0), 0)
        for phase, (_, ledger) in body.best.items():
            alive = base + ledger
            total = np.where(event.times > 0, alive.sum(axis=0), -np.inf)
            self._compare_with_largest(phase, alive, total)
        self.now += body.now * event.times

    def _compare_with_largest(self, phase: str, alive: Floats, total: Floats) -> None:
        if phase not in self.best:
            self.best[phase] = _LargestInstant(total, alive)
            return
        best = self.best[phase]
        larger = total > best.total
        if larger.any():
            np.copyto(best.total, total, where=larger)
            np.copyto(best.ledger, alive, where=larger)
