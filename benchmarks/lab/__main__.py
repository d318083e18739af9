"""Experiments on a small cluster inside one machine.

    python -m benchmarks.lab NAME [--json]

Needs root and iproute2; without them, it prints the reason and measures nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.lab import (
    baseline,
    choose,
    collectives,
    evaluate,
    experiments,
    expert,
    machine,
    network,
    profiles,
    rates,
    report,
    sweep,
    tensor,
)


class Experiment(NamedTuple):
    """One experiment: `measure` runs it, `show` prints its result as text."""

    title: str
    measure: Callable[[], Any]
    show: Callable[[Any], None]
    # Whether it needs hosts; experiments that only read recorded results do not.
    on_hosts: bool = True


EXPERIMENTS = {
    "rates": Experiment("measured rate of links against the set rate", rates.measure, rates.show),
    "baseline": Experiment(
        "ddp, zero2, zero3 on two hosts, unlimited and 1 Gbit/s", baseline.measure, baseline.show
    ),
    "sweep": Experiment(
        "every strategy at five rates with two batches, 2 x 2 ranks", sweep.measure, sweep.show
    ),
    "machine": Experiment("shardwise calibrate on the hosts", machine.measure, machine.show),
    "collectives": Experiment(
        "latency and rate of collectives through limited links",
        collectives.measure,
        collectives.show,
    ),
    **{
        name: Experiment(question.title, experiments.measure(name), experiments.show(name))
        for name, question in experiments.QUESTIONS.items()
    },
    "plan": Experiment("the plan's choice against the best cell", choose.plan, choose.show_plan),
    "tune": Experiment("tune with a few probes at every rate", choose.tuned, choose.show_tuned),
    "tensor": Experiment(
        "sharding and tensor parallelism inside and across hosts", tensor.measure, tensor.show
    ),
    "tensor-evaluate": Experiment(
        "predictions of the tensor cells, calibrated on six of them",
        tensor.evaluate,
        tensor.show,
        on_hosts=False,
    ),
    "expert": Experiment(
        "sharding and expert parallelism inside and across hosts", expert.measure, expert.show
    ),
    "expert-evaluate": Experiment(
        "predictions of the expert cells, calibrated on six of them",
        expert.evaluate,
        expert.show,
        on_hosts=False,
    ),
    "evaluate": Experiment(
        "predictions calibrated on six cells of the sweep, tested on the others",
        evaluate.measure,
        evaluate.show,
        on_hosts=False,
    ),
    "profiles": Experiment(
        "every cell as StepProfiles, for shardwise report",
        profiles.measure,
        profiles.show,
        on_hosts=False,
    ),
    "report": Experiment(
        "evaluate, and write docs/lab.md", report.measure, report.show, on_hosts=False
    ),
}


def main() -> None:
    titles = "\n".join(f"  {name:16}{found.title}" for name, found in EXPERIMENTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lab",
        description="Experiments on a small cluster inside one machine.",
        epilog=f"experiments:\n{titles}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=EXPERIMENTS, metavar="NAME")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    experiment = EXPERIMENTS[options.name]
    reason = network.available() if experiment.on_hosts else None
    if reason is not None:
        print(json.dumps({"skipped": reason}) if options.json else f"skipped: {reason}")
        return
    result = experiment.measure()
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        experiment.show(result)


if __name__ == "__main__":
    main()
