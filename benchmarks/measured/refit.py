"""Fit coefficients of a device to contributions, by the protocol, and judge them on held-out ones.

The fit is that of `shardwise calibrate --from-run`. It starts from the coefficients of the device's
family, which published runs were fitted to; these hold where contributions tell nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.accuracy import summary
from benchmarks.accuracy_catalogue import CATALOGUE, UNITS
from benchmarks.measured.files import Entry
from benchmarks.measured.protocol import Protocol
from shardwise.observe.observation import Observation, units_of
from shardwise.predict.kernels import catalogue_coefficients, coefficients_for, hardware_of
from shardwise.predict.rates import Coefficients
from shardwise.runs.contribution.record import Contribution
from shardwise.spec.run import RunSpec
from shardwise.trials.calibrate.fit import Fit, fit


class Refit(NamedTuple):
    """New coefficients of a device; errors of tokens/s with those of the catalogue and with these.

    Each error is a summary; held-out ones are None without a held-out source.
    """

    device: str
    sources: list[str]
    fit: Fit
    fitted: tuple[dict[str, float], dict[str, float]]
    held_out: tuple[dict[str, float], dict[str, float]] | None


def observation(run: Contribution) -> Observation | None:
    """A contribution as a fit takes it; None if it does not describe model and cluster."""
    model, cluster, time = run.model_spec(), run.hardware.spec(), run.measured.time
    if model is None or time is None or run.hardware.is_cpu or run.hardware.device is None:
        return None
    if hardware_of(cluster, run.strategy.param_dtype) is None:
        return None
    spec = RunSpec(model=model, cluster=cluster, job=run.job, strategy=run.strategy).resolved()
    exposed = time.exposed_communication_s
    return Observation(spec, units_of(spec), time.step_s, time.compute_s, exposed)


def refit(entries: Sequence[Entry], protocol: Protocol) -> list[Refit]:
    """New coefficients for each device with enough fitted runs."""
    devices: dict[str, dict[str, list[tuple[str, Observation]]]] = {}
    for entry in entries:
        one = observation(entry.run)
        if one is not None:
            splits = devices.setdefault(entry.run.hardware.label, {"fit": [], "heldout": []})
            splits[protocol.split(entry.source)].append((entry.source, one))
    return [
        _refit(device, splits["fit"], [one for _, one in splits["heldout"]])
        for device, splits in sorted(devices.items())
        if len(splits["fit"]) >= protocol.least_runs
    ]


def _refit(device: str, chosen: list[tuple[str, Observation]], held: list[Observation]) -> Refit:
    sources = sorted({source for source, _ in chosen})
    runs = [one for _, one in chosen]
    start = catalogue_coefficients(runs[0].run.cluster)
    found = fit(runs, start=start, source=f"{len(runs)} contributed runs: {', '.join(sources)}")
    new = Coefficients(**found.calibration.coefficients())
    shipped = coefficients_for(runs[0].run.cluster)
    assert shipped is not None

    def judged(group: list[Observation]) -> tuple[dict[str, float], dict[str, float]]:
        return summary(_errors(group, shipped)), summary(_errors(group, new))

    return Refit(device, sources, found, judged(runs), judged(held) if held else None)


def _errors(runs: list[Observation], k: Coefficients) -> Any:
    """Of tokens per second."""
    return np.asarray([one.step_s / one.predict(k, one.run.cluster).step_s - 1 for one in runs])


# ---- catalogue ------------------------------------------------------------------------------


def write(found: Sequence[Refit]) -> None:
    """Replace the coefficients of these devices in the catalogue."""
    text = CATALOGUE.read_text(encoding="utf-8")
    for one in found:
        sections = re.compile(rf"^\[device-{re.escape(one.device)}\.[^\[]*", re.MULTILINE)
        text = sections.sub("", text).rstrip() + "\n\n" + "\n".join(_sections(one))
    CATALOGUE.write_text(text, encoding="utf-8")


def _sections(one: Refit) -> list[str]:
    lines = []
    for name, value in one.fit.calibration.coefficients().items():
        lines += [
            f"[device-{one.device}.{name}]",
            f'unit = "{UNITS.get(name, "as in Calibration")}"',
            *(f"{key} = {value:.6g}" for key in ("value", "low", "high")),
            f'source = "fitted on {one.fit.calibration.source}"',
            "",
        ]
    return lines
