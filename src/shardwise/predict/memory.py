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

Ledger = dict[str, Floats]
# A search asks only for the peak and for what of it is gradients.
_ALL_TERMS = {term: term for term in TERMS}
_GRADIENTS_APART = {term: "gradients" if term == "gradients" else "other" for term in TERMS}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """One row per configuration: what is alive in each phase, and which phase is the largest."""

    phases: dict[str, Ledger]
    host_bytes: Floats
    # Where gradients are scattered and parameters gathered on streams of their own, and how much
    # the largest gather takes there.
    streams: Bools
    gather_bytes: Floats

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
        """What the allocator holds for other streams when the peak is reached.

        torch's caching allocator keeps a pool per stream and never lends between them. Sharded
        gradients lie in the scattering stream's pool and gathered buffers in the gathering one's;
        both pools stay as large as they once were, also while their tensors are gone.
        """
        gradients = np.stack([ledger["gradients"] for ledger in self.phases.values()])
        apart = (self.totals - gradients).max(axis=0) + gradients.max(axis=0)
        pooled: Floats = np.where(self.streams, apart + self.gather_bytes - self.peak_bytes, 0.0)
        return pooled

    def peak_phase(self, row: int = 0) -> str:
        return list(self.phases)[int(self.totals[:, row].argmax())]

    def terms_at_peak(self, row: int = 0) -> dict[str, float]:
        ledger = self.phases[self.peak_phase(row)]
        return {term: float(ledger[term][row]) for term in TERMS}


def predict_memory(
    units: ModelUnits, c: Configurations, optimizer: Optimizer = "adamw", *, by_term: bool = True
) -> Memory:
    """Memory of each configuration, with the states of an optimizer.

    Counted are tensors. What a kernel or a communication library needs for itself while it runs
    is not: NCCL's buffers lie outside torch's allocator, Gloo copies on threads of its own.
    Not `by_term`, only gradients are told from the rest.
    """
    return memory_of(emit_steps(units, c, optimizer), by_term=by_term)


def memory_of(steps: Steps, *, by_term: bool = True) -> Memory:
    """The same of programs that are there already."""
    units, c = steps.units, steps.c
    lines = _ALL_TERMS if by_term else _GRADIENTS_APART
    found: Floats = np.empty((len(PHASES), len(set(lines.values())), len(c)))
    for part in steps.parts:
        found[:, :, part.rows] = peaks(part.program, len(part.rows), lines)
    names = list(dict.fromkeys(lines.values()))
    sizes = Sizes(units, c, steps.optimizer)
    kinds = {id(unit): unit for unit in units.units}.values()
    largest = np.maximum.reduce([sizes.gathered_bytes(unit) for unit in kinds])
    return Memory(
        phases={
            phase: dict(zip(names, ledger, strict=True))
            for phase, ledger in zip(PHASES, found, strict=True)
        },
        host_bytes=np.where(c.offload, sizes.state_bytes, 0.0),
        streams=c.sharded & (c.shard > 1),
        gather_bytes=largest,
    )


def sum_terms(ledger: Ledger) -> Floats:
    total: Floats = np.sum(list(ledger.values()), axis=0)
    return total


def peaks(program: Program, rows: int, lines: dict[str, str] = _ALL_TERMS) -> Floats:
    """The ledger at the largest instant of each phase: (phases, lines, rows)."""
    names = list(dict.fromkeys(lines.values()))
    line = {term: names.index(name) for term, name in lines.items()}
    fold = _Fold(line, np.zeros((len(names), rows)))
    fold.read(program)
    return np.stack([fold.best[phase].ledger for phase in PHASES])


class _Best(NamedTuple):
    """The largest instant of a phase so far."""

    total: Floats
    ledger: Floats


class _Fold:
    """What is alive now, and the largest instant of each phase."""

    def __init__(self, line: dict[str, int], now: Floats, phase: str = "forward") -> None:
        self.line, self.now, self.phase = line, now, phase
        self.best: dict[str, _Best] = {}

    def read(self, program: Program) -> None:
        for event in program:
            if isinstance(event, Alloc):
                self.now[self.line[event.term]] += event.bytes
            elif isinstance(event, Instant):
                alive = self.now.copy()
                for term, size in event.also:
                    alive[self.line[term]] += size
                self._look(self.phase, alive, alive.sum(axis=0))
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
        # The last repetition is the largest if each leaves more than it found.
        grows = body.now.sum(axis=0) > 0
        base = self.now + body.now * np.where(grows, np.maximum(event.times - 1, 0), 0)
        for phase, (_, ledger) in body.best.items():
            alive = base + ledger
            total = np.where(event.times > 0, alive.sum(axis=0), -np.inf)
            self._look(phase, alive, total)
        self.now += body.now * event.times

    def _look(self, phase: str, alive: Floats, total: Floats) -> None:
        if phase not in self.best:
            self.best[phase] = _Best(total, alive)
            return
        best = self.best[phase]
        larger = total > best.total
        if larger.any():
            np.copyto(best.total, total, where=larger)
            np.copyto(best.ledger, alive, where=larger)
