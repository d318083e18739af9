"""Find the fastest configuration with few benchmarks (probes).

Each probe runs the configuration that is predicted fastest. Afterwards the coefficients are fitted
to all measurements and the remaining predictions are updated. A probe that fails excludes its
configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from shardwise.observe.observation import Observation, units_of
from shardwise.predict.kernels import coefficients_for
from shardwise.predict.rates import Coefficients
from shardwise.spec.run import RunSpec
from shardwise.trials.calibrate.fit import CPU, fit
from shardwise.units.unit import ModelUnits

# Assumed relative error of predictions: before two probes were measured, and the least afterwards.
INITIAL_ERROR, LEAST_ERROR = 0.5, 0.05

# Why no more probes were run.
Stopped = Literal["rest is slower", "limit reached", "all probed"]


class Candidate(NamedTuple):
    """A configuration to benchmark; `run` is resolved."""

    name: str
    run: RunSpec

    @property
    def tokens(self) -> int:
        """Tokens of one step on all devices."""
        strategy = self.run.strategy
        sequences = strategy.micro_batch * strategy.accumulate * strategy.data_parallel
        return sequences * self.run.job.seq_len


class Probe(NamedTuple):
    """One benchmark: the step predicted just before it, and its measured step or its failure."""

    candidate: Candidate
    predicted_s: float
    measured_s: float | None
    failure: str = ""

    @property
    def tokens_per_s(self) -> float | None:
        """Measured tokens per second of all devices; None if the benchmark failed."""
        return self.candidate.tokens / self.measured_s if self.measured_s else None


class TuneResult(NamedTuple):
    """All probes in their order, and why no more were run."""

    probes: list[Probe]
    stopped: Stopped
    # The remaining configurations are slower even if predictions are off by this share.
    error: float = INITIAL_ERROR

    @property
    def best(self) -> Probe | None:
        """The measured probe with the most tokens per second; None if all failed."""
        return _best(self.probes)


def _best(probes: Sequence[Probe]) -> Probe | None:
    """The measured probe with the most tokens per second; None if there is none."""
    measured = [probe for probe in probes if probe.measured_s is not None]
    return max(measured, key=lambda probe: probe.tokens_per_s or 0.0, default=None)


# Benchmarks a candidate: the seconds of its step, or a sentence that says why it failed.
Run = Callable[[Candidate], float | str]


def tune(candidates: Sequence[Candidate], run: Run, most: int) -> TuneResult:
    """Benchmark at most `most` candidates; stop earlier when no other one can be faster."""
    left = list(candidates)
    units = {one.name: units_of(one.run) for one in candidates}
    coefficients = coefficients_for(left[0].run.cluster) or CPU
    seen: list[Observation] = []
    probes: list[Probe] = []
    error = INITIAL_ERROR
    while left:
        predicted = {one.name: _predicted(one, units[one.name], coefficients) for one in left}
        chosen = min(left, key=lambda one: predicted[one.name] / one.tokens)
        best = _best(probes)
        if best is not None and best.measured_s is not None:
            least = predicted[chosen.name] * (1 - error) / chosen.tokens
            if least >= best.measured_s / best.candidate.tokens:
                return TuneResult(probes, "rest is slower", error)
        if len(probes) == most:
            return TuneResult(probes, "limit reached", error)
        left.remove(chosen)
        found = run(chosen)
        if isinstance(found, str):
            probes.append(Probe(chosen, predicted[chosen.name], None, found))
            continue
        probes.append(Probe(chosen, predicted[chosen.name], found))
        seen.append(Observation(chosen.run, units[chosen.name], found, None, None))
        coefficients = Coefficients(**fit(seen).calibration.coefficients())
        error = _error(probes)
    return TuneResult(probes, "all probed", error)


def _predicted(one: Candidate, units: ModelUnits, coefficients: Coefficients) -> float:
    """The predicted seconds of a candidate's step."""
    blank = Observation(one.run, units, 1.0, None, None)
    return blank.predict(coefficients, one.run.cluster).step_s


def _error(probes: list[Probe]) -> float:
    """The relative error to assume: the larger one of the last two predictions, after a first fit.

    At least LEAST_ERROR; INITIAL_ERROR before two probes were measured.
    """
    measured = [probe for probe in probes if probe.measured_s]
    if len(measured) < 2:
        return INITIAL_ERROR
    last = [abs(probe.predicted_s / (probe.measured_s or 1.0) - 1) for probe in measured[1:]]
    return max(LEAST_ERROR, *last[-2:])
