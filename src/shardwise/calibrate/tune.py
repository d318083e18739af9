"""Few probes instead of many: run what is predicted best, learn from it, and stop when it is clear.

After every probe the coefficients are fitted anew to all that was measured, and the rest is
predicted with them. A probe that breaks is a result: its configuration is out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardwise.calibrate.fit import CPU, fit
from shardwise.calibrate.runs import Observation, units_of
from shardwise.predict.cost import Coefficients
from shardwise.predict.time import coefficients_for
from shardwise.spec.run import RunSpec
from shardwise.units.unit import ModelUnits

# How far predictions may be off before anything was measured, and at least.
AT_FIRST, AT_LEAST = 0.5, 0.05


class Candidate(NamedTuple):
    """A configuration under a name; `run` is resolved."""

    name: str
    run: RunSpec

    @property
    def tokens(self) -> int:
        strategy = self.run.strategy
        sequences = strategy.micro_batch * strategy.accumulate * strategy.devices
        return sequences * self.run.job.seq_len


class Probe(NamedTuple):
    """One that was run: what was predicted just before, and what came out or went wrong."""

    candidate: Candidate
    predicted_s: float
    measured_s: float | None
    failure: str = ""

    @property
    def tokens_per_s(self) -> float | None:
        return self.candidate.tokens / self.measured_s if self.measured_s else None


class Tuned(NamedTuple):
    """All probes in their order, and why there were no more."""

    probes: list[Probe]
    reason: str

    @property
    def best(self) -> Probe | None:
        """The fastest that was measured, by tokens per second."""
        done = [probe for probe in self.probes if probe.measured_s is not None]
        return max(done, key=lambda probe: probe.tokens_per_s or 0.0, default=None)


# Runs a candidate: seconds of its step, or a sentence about why there are none.
Run = Callable[[Candidate], float | str]


def tune(candidates: Sequence[Candidate], run: Run, most: int) -> Tuned:
    """Probe at most so many."""
    left = list(candidates)
    units = {one.name: units_of(one.run) for one in candidates}
    k = coefficients_for(left[0].run.cluster) or CPU
    seen: list[Observation] = []
    probes: list[Probe] = []
    error = AT_FIRST
    while left:
        predicted = {one.name: _predicted(one, units[one.name], k) for one in left}
        chosen = min(left, key=lambda one: predicted[one.name] / one.tokens)
        best = Tuned(probes, "").best
        if best is not None and best.measured_s is not None:
            least = predicted[chosen.name] * (1 - error) / chosen.tokens
            if least >= best.measured_s / best.candidate.tokens:
                return Tuned(probes, f"the rest is predicted slower by more than {error:.0%}")
        if len(probes) == most:
            return Tuned(probes, f"{most} probes were made")
        left.remove(chosen)
        found = run(chosen)
        if isinstance(found, str):
            probes.append(Probe(chosen, predicted[chosen.name], None, found))
            continue
        probes.append(Probe(chosen, predicted[chosen.name], found))
        seen.append(Observation(chosen.run, units[chosen.name], found, None, None))
        k = Coefficients(**fit(seen).calibration.coefficients())
        error = _error(probes)
    return Tuned(probes, "every candidate was probed")


def _predicted(one: Candidate, units: ModelUnits, k: Coefficients) -> float:
    blank = Observation(one.run, units, 1.0, None, None)
    return blank.predict(k, one.run.cluster).step_s


def _error(probes: list[Probe]) -> float:
    """How far the last prediction was off that knew of others; nothing is known after one."""
    done = [probe for probe in probes if probe.measured_s]
    if len(done) < 2:
        return AT_FIRST
    last = [abs(probe.predicted_s / (probe.measured_s or 1.0) - 1) for probe in done[1:]]
    return max(AT_LEAST, *last[-2:])
