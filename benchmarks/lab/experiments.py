"""The smaller experiments: each is a question and the cases that answer it.

Predictions use the coefficients fitted on six cells of the sweep. Only the current speed of the
cores is fitted to these experiments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from benchmarks.lab.calibrated import calibrated
from benchmarks.lab.cases import MODEL, RANKS_PER_HOST, STRATEGIES, Case, load, measure_cases
from shardwise.observe.observation import Observation, StepSeconds, units_of
from shardwise.predict.api import estimate_run
from shardwise.predict.rates import Coefficients

GBIT = 1e9
# Eight sequences save many activations; two make a step of small messages.
LARGE, SMALL = 8, 2
CROSSING = (0.5e9, 0.7e9, 1e9, 1.4e9, 2e9)


# The speed of a shared machine changes from hour to hour. Every experiment trains this case in its
# rounds, to measure the current speed of the cores.
ANCHOR = Case("anchor", 4 * GBIT, {"kind": "ddp", "micro_batch": LARGE})


class Question(NamedTuple):
    """A question and the cases that answer it."""

    title: str
    cases: list[Case]


def _recompute() -> list[Case]:
    shares = {"none": "none", "half": 0.5, "full": "full"}
    return [
        Case(f"recompute {name}", GBIT,
             {"kind": "zero3", "micro_batch": LARGE, "recompute": share}, weighed=True)
        for name, share in shares.items()
    ]  # fmt: skip


def _accumulation() -> list[Case]:
    base = {"micro_batch": SMALL, "accumulate": 2}
    return [
        Case(f"{name}, synchronised {sync}", GBIT, {**STRATEGIES[name], **base, "grad_sync": sync})
        for name in STRATEGIES
        for sync in ("every", "last")
    ]


def _unit_size() -> list[Case]:
    model = {**MODEL, "layers": 8}
    return [
        Case(f"{blocks} blocks a unit", 4 * GBIT,
             {"kind": "zero3", "micro_batch": SMALL, "blocks_per_unit": blocks}, model)
        for blocks in (1, 2, 4, 8)
    ]  # fmt: skip


def _scaling() -> list[Case]:
    found = [Case("1 rank", GBIT, {"kind": "single", "micro_batch": LARGE}, hosts=1, ranks=1)]
    for hosts, ranks in ((2, 1), (2, 2)):
        found += [
            Case(f"{hosts * ranks} ranks, {name}", GBIT,
                 {**STRATEGIES[name], "micro_batch": LARGE}, hosts=hosts, ranks=ranks)
            for name in ("ddp", "zero3")
        ]  # fmt: skip
    return found


def _crossover() -> list[Case]:
    """Cases for a memory budget in which only hybrid sharding needs recompute."""
    kinds: dict[str, dict[str, Any]] = {
        "full": STRATEGIES["zero3"],
        "hybrid": {**STRATEGIES["hybrid"], "recompute": "full"},
    }
    return [
        Case(f"{rate / 1e6:.0f}Mbit {name}", rate, {**strategy, "micro_batch": LARGE})
        for rate in CROSSING
        for name, strategy in kinds.items()
    ]


def _anchored(name: str) -> list[Case]:
    return [*QUESTIONS[name].cases, ANCHOR]


QUESTIONS = {
    "recompute": Question("time and memory of recompute", _recompute()),
    "accumulation": Question(
        "gradients reduced in every micro-batch or only in the last", _accumulation()
    ),
    "unit-size": Question("few large messages or many small ones", _unit_size()),
    "scaling": Question("the same work per rank on 1, 2 and 4 ranks", _scaling()),
    "crossover": Question(
        "hybrid sharding with recompute against full sharding without", _crossover()
    ),
}


def measure(name: str) -> Callable[[], Mapping[str, Any]]:
    def run() -> Mapping[str, Any]:
        measure_cases(_anchored(name), keep_as=name)
        return load(name) or {}

    return run


def predict(case: Case, k: Coefficients) -> StepSeconds:
    """Predict a step; `k` is for ranks that share a core and is rescaled for fewer ranks."""
    run = case.run()
    blank = Observation(run, units_of(run), 1.0, None, None)
    return blank.predict(_with_share(k, RANKS_PER_HOST / case.ranks), run.cluster)


def of_the_hour(k: Coefficients, found: Mapping[str, Any]) -> Coefficients:
    """Rescale coefficients to the speed of the cores in an experiment, if it has an anchor."""
    if ANCHOR.name not in found:
        return k
    real = float(found[ANCHOR.name]["median_s"])
    low, high = 0.25, 4.0
    while high / low > 1.0001:
        share = (low * high) ** 0.5
        if predict(ANCHOR, _with_share(k, share)).step_s > real:
            low = share
        else:
            high = share
    return _with_share(k, (low * high) ** 0.5)


def _with_share(k: Coefficients, share: float) -> Coefficients:
    """Coefficients of a rank with `share` times the compute of a core."""
    return k._replace(
        matmul_efficiency=k.matmul_efficiency * share,
        attention_efficiency=k.attention_efficiency * share,
        elementwise_factor=k.elementwise_factor / share,
        optimizer_factor=k.optimizer_factor / share,
        overhead_s=k.overhead_s / share,
    )


def peak_bytes(case: Case) -> int:
    """Predicted peak memory of the fullest rank."""
    return estimate_run(case.run()).known_memory.peak_allocated_bytes


def show(name: str) -> Callable[[Mapping[str, Any]], None]:
    def tell(result: Mapping[str, Any]) -> None:
        k = of_the_hour(calibrated(), result["cases"])
        print(f"{QUESTIONS[name].title}: ms per step, predicted and measured")
        for case in QUESTIONS[name].cases:
            found = result["cases"][case.name]
            mine, real = predict(case, k).step_s, found["median_s"]
            line = f"  {case.name:28}{mine * 1e3:8.0f}{real * 1e3:8.0f}{mine / real - 1:+8.1%}"
            if "peak_bytes" in found:
                line += (f"   peak {peak_bytes(case) / 1e6:.1f} MB predicted, "
                         f"{found['peak_bytes'] / 1e6:.1f} MB measured")  # fmt: skip
            print(line)
        losses = [tuple(found["loss"]) for found in result["cases"].values() if "loss" in found]
        if losses:
            print(f"losses bit-identical: {len(set(losses)) == 1}")

    return tell
