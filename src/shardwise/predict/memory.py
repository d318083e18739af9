"""Bytes on one device through a step, by term and by phase.

The peak is a maximum over phases, never one formula: which phase sets it changes with the batch,
the vocabulary and the strategy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.predict.choreography import TERMS, Ledger, Step, sum_terms
from shardwise.predict.configurations import Bools, Configurations, Floats
from shardwise.units.unit import ModelUnits

PHASES = (
    "forward",
    "end of forward",
    "loss backward",
    "steady backward",
    "last backward",
    "optimizer step",
)


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


def predict_memory(units: ModelUnits, c: Configurations, optimizer_states: int = 2) -> Memory:
    """Memory of each configuration; `optimizer_states` tensors per parameter are kept.

    Counted are tensors. What a kernel or a communication library needs for itself while it runs
    is not: NCCL's buffers lie outside torch's allocator, Gloo copies on threads of its own.
    """
    step = Step(units, c, optimizer_states)
    phases = {
        "forward": step.largest(step.forward),
        "end of forward": step.largest(step.end_of_forward),
        "loss backward": step.largest(step.loss_backward),
        "steady backward": step.largest(step.steady_backward),
        "last backward": step.largest(step.last_backward),
        "optimizer step": step.optimizer_step(),
    }
    state = step.whole / c.shard * c.master_bytes
    host = np.where(c.offload, state * (2 + optimizer_states), 0.0)
    streams = c.sharded & (c.shard > 1)
    largest = np.maximum(step.root, step.blocks.max(axis=1, initial=0.0)) * c.param_bytes
    return Memory(phases=phases, host_bytes=host, streams=streams, gather_bytes=largest)
