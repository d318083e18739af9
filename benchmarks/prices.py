"""The few coefficients of time that runs give, fitted jointly on all stacks with a level for each.

Kernels give what a device can do (`benchmarks/kernels`), a run's software which kernels it calls
(`benchmarks/data/evidence.csv`). What is left is here: the share of a burst that a step sustains,
element-wise work, the network, contention, overhead. Each has a start that is known without runs,
and how far it may lie from that. A stack's level has such a prior too: weak ones would take up what
other stacks lack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.validation import Row, predict
from shardwise.predict.kernels import coefficients_of
from shardwise.predict.rates import Coefficients
from shardwise.spec.catalogue import step_coefficients

Numbers = npt.NDArray[np.floating[Any]]
Values = dict[str, float]


class Parameter(NamedTuple):
    """A coefficient before runs are looked at: its value, and the deviation of its logarithm."""

    start: float
    deviation: float
    unit: str


# Shares of measured products, by generation of devices; then what all devices have.
SUSTAINED = ("ampere", "hopper", "blackwell")
PARAMETERS: dict[str, Parameter] = {
    **{
        f"sustained_{name}": Parameter(0.88, 0.07, "of measured products, in a step of training")
        for name in SUSTAINED
    },
    "elementwise_factor": Parameter(1.15, 0.2, "bytes moved per byte that operations touch"),
    "fused": Parameter(0.7, 0.3, "of the way from single element-wise operations to fused ones"),
    "network_efficiency": Parameter(0.75, 0.3, "of the network between nodes"),
    "network_latency_s": Parameter(4e-5, 0.7, "seconds per hop between nodes"),
    "contention": Parameter(0.1, 0.7, "seconds lost per second of compute beside a collective"),
    "overhead_s": Parameter(0.01, 0.5, "seconds of a step, whatever it does"),
    "routed_s": Parameter(1e-8, 0.7, "seconds per routed token and pass"),
    "low_bit_products": Parameter(
        1.0, 0.15, "seconds of products in 8 or 4 bits per second of their kernels"
    ),
    "low_bit_casts": Parameter(0.5, 0.7, "of the casts of inputs that kernels were measured with"),
    "head_bytes": Parameter(150.0, 0.7, "bytes per logit of a head over parts of the vocabulary"),
}
# Of one stack alone: how much faster its own attention is than the kernel as published, the time of
# its host for a block's forward, and what its step takes besides.
OF_STACKS: dict[str, dict[str, Parameter]] = {
    "llm-foundry": {"attention_factor": Parameter(1.0, 0.2, "of the published kernel")},
    "nanotron": {"overhead_s": Parameter(0.03, 0.7, "seconds of a step, whatever it does")},
    "prime-rl": {
        "block_host_s": Parameter(1e-3, 1.0, "seconds of the host per block and pass"),
        "overhead_s": Parameter(0.15, 0.7, "seconds of a step, whatever it does"),
    },
}
LEVEL = Parameter(1.0, 0.1, "seconds of its steps per second predicted")
# What is known better than runs tell: fused optimizers, launches, trees of all-reduces.
KNOWN: Values = {
    "launch_s": 6e-6,
    "optimizer_factor": 2.2,
    "tree_efficiency": 1.0,
    "tree_falloff": 0.1,
}
# Shares that are not more than all.
SHARES = ("network_efficiency", "fused", *(f"sustained_{name}" for name in SUSTAINED))
# Log errors beyond this count less and less.
OUTLIER = 0.05
# Weight of one prior deviation against a row's error of 5 %.
PRIOR = 0.05
# Evaluations of a fit from its prior, and from the values of another.
ROUNDS, NEARBY = 30, 12
# The same of the mean level, which is 1 within 2 %; and a step that is larger than the kinks of a
# simulated step.
CENTRED = PRIOR / 0.02
STEP = 1e-3
NOWHERE: Mapping[str, float] = {}
# A run says something of a coefficient that moves its speed by a fiftieth of its own change.
_SAYS_SOMETHING = 0.02
_CHANGE = -0.1


def can_be_fitted(row: Row) -> bool:
    """Whether its device is of a generation whose sustained share is fitted: others are blind."""
    return row.kind in SUSTAINED


def stack_of(row: Row) -> str:
    """The stack whose level a row shares."""
    return row.software.stack


def own_parameters(stacks: Iterable[str]) -> dict[str, Parameter]:
    """Those of stacks, by names like "llm-foundry.level"."""
    return {
        f"{stack}.{name}": parameter
        for stack in stacks
        for name, parameter in {**OF_STACKS.get(stack, {}), "level": LEVEL}.items()
    }


class Fitted(NamedTuple):
    """Fitted values by name, and one standard deviation of each as a factor."""

    values: Values
    spread: Values


def fit(rows: Sequence[Row], near: Mapping[str, float] = NOWHERE) -> Fitted:
    """Least squares of log errors, sources weighing by the root of their rows.

    The search begins at the values `near`, where there are any; the prior stays at the start.
    """
    from scipy.optimize import least_squares  # type: ignore[import-untyped]  # only for fits

    chosen = list(rows)
    parameters = {**PARAMETERS, **own_parameters(sorted({stack_of(row) for row in chosen} - {""}))}
    names = list(parameters)
    start = np.log([parameters[name].start for name in names])
    begin = np.log([near.get(name, parameters[name].start) for name in names])
    stiff = PRIOR / np.asarray([parameters[name].deviation for name in names])
    levels = np.asarray([name.endswith(".level") for name in names])
    truth = np.log([row.tokens_per_s for row in chosen])
    sizes: dict[str, int] = {}
    for row in chosen:
        sizes[row.source] = sizes.get(row.source, 0) + 1
    weights = np.asarray([sizes[row.source] ** -0.5 for row in chosen])
    weights /= np.sqrt((weights**2).mean())

    def unpacked(packed: Numbers) -> Values:
        found = dict(zip(names, (float(value) for value in np.exp(packed)), strict=True))
        return {name: min(v, 1.0) if name in SHARES else v for name, v in found.items()}

    def residuals(packed: Numbers) -> Numbers:
        off = np.log(predicted(chosen, unpacked(packed))) - truth
        # What all stacks share is no level of theirs.
        shared = CENTRED * packed[levels].mean() if levels.any() else 0.0
        return np.concatenate([weights * off, stiff * (packed - start), [shared]])

    done = least_squares(
        residuals,
        begin,
        diff_step=STEP,
        loss="soft_l1",
        f_scale=OUTLIER,
        max_nfev=NEARBY if near else ROUNDS,
        x_scale="jac",
    )
    covariance = np.linalg.pinv(done.jac.T @ done.jac) * 2 * done.cost / max(1, len(chosen))
    spread = {n: float(np.exp(np.sqrt(v))) for n, v in zip(names, np.diag(covariance), strict=True)}
    return Fitted(unpacked(done.x), spread)


def identified(rows: Sequence[Row], values: Mapping[str, float]) -> dict[str, int]:
    """The stacks with a run that says something of a coefficient, by its name."""
    before = np.log(predicted(rows, values))
    stacks = np.asarray([stack_of(row) for row in rows])
    found = {}
    for name in PARAMETERS:
        changed = {**values, name: values[name] * np.exp(_CHANGE)}
        elasticity = np.abs((np.log(predicted(rows, changed)) - before) / _CHANGE)
        found[name] = len(set(stacks[elasticity >= _SAYS_SOMETHING]))
    return found


def coefficients(row: Row, values: Mapping[str, float], *, level: bool = True) -> Coefficients:
    """Those of a row; without `level`, as if nobody had measured its stack."""
    stack = row.software.stack
    known = {name: value for name, value in values.items() if level or name != f"{stack}.level"}
    return coefficients_of(row.device, row.software, {**KNOWN, **known})


def predicted(rows: Sequence[Row], values: Mapping[str, float], *, level: bool = True) -> Numbers:
    """Tokens per second and device."""
    known: dict[tuple[str, ...], Coefficients] = {}

    def of(row: Row) -> Coefficients:
        software = row.software
        key = (row.device.name, software.name, *software.attention.values())
        if key not in known:
            known[key] = coefficients(row, values, level=level)
        return known[key]

    return predict(list(rows), of)


def shipped() -> Values:
    """The values of the catalogue."""
    return step_coefficients()


class LeftOut(NamedTuple):
    """The rows of a stack, and their log errors when it is left out of the fit."""

    stack: str
    rows: list[Row]
    off: Numbers


def left_out(
    rows: Sequence[Row],
    group: Callable[[Row], str] = stack_of,
    near: Mapping[str, float] = NOWHERE,
) -> list[LeftOut]:
    """Each stack left out whole, and predicted as one that nobody has measured."""
    found = []
    for name in sorted({group(row) for row in rows}):
        inside = [row for row in rows if group(row) == name]
        others = fit([row for row in rows if group(row) != name], near=near).values
        found.append(LeftOut(name, inside, log_errors(inside, others, level=False)))
    return found


def log_errors(rows: Sequence[Row], values: Mapping[str, float], *, level: bool = True) -> Numbers:
    """ln(predicted / measured) of tokens per second."""
    truth = np.asarray([row.tokens_per_s for row in rows])
    off: Numbers = np.log(predicted(rows, values, level=level) / truth)
    return off
