"""Cost of plans, estimates and what-if studies, from 1 to 100,000 devices."""

from __future__ import annotations

import statistics
import time

from benchmarks.page import rows
from benchmarks.scale.cost import Case, Measured, Part, exponent, seconds, timed

MODELS = {"8B": "llama-3-8b", "70B": "llama-3-70b", "405B": "llama-3.1-405b"}
DEVICES = (1, 8, 64, 512, 4096, 32_768, 100_000)
SOME = (8, 512, 100_000)
COMMANDS = ("plan", "estimate", "what-if")


def cluster_of(devices: int) -> str:
    if devices <= 8:
        return f"{devices}xH100-SXM"
    return f"{devices // 8}x8xH100-SXM@400Gbps"


def measure(command: str, model: str, devices: int) -> dict[str, float]:
    cluster = cluster_of(devices)
    begin = time.process_time()
    from shardwise.planning import api, whatif  # noqa: F401

    start = time.process_time()
    if command == "plan":
        found = api.plan(model, cluster)
        counts = {"priced": found.considered, "fitting": found.fitting}
    elif command == "estimate":
        memory = api.estimate(model, cluster, "zero3").memory
        assert memory is not None
        counts = {"peak_bytes": memory.peak_allocated_bytes}
    else:
        counts = {"points": _vary(model, cluster)}
    return {"answer_s": time.process_time() - start, "import_s": start - begin, **counts}


def _vary(model: str, cluster: str) -> int:
    """Run a what-if study of four network bandwidths; return its number of points."""
    from shardwise.planning.problem import Problem
    from shardwise.planning.whatif import study
    from shardwise.spec.question import describe_run

    run = describe_run(model, cluster)
    problem = Problem(run.model, run.cluster, run.job, run.strategy)
    return len(study(problem, "network", ["100", "200", "400", "800"]))


def _cases(devices: dict[str, tuple[int, ...]], others_on: tuple[int, ...]) -> list[Case]:
    plans: list[Case] = [
        {"command": "plan", "model": MODELS[name], "devices": n}
        for name, each in devices.items()
        for n in each
    ]
    others: list[Case] = [
        {"command": command, "model": MODELS["70B"], "devices": n}
        for n in others_on
        for command in COMMANDS[1:]
    ]
    return plans + others


def plans_of(found: list[Measured], model: str) -> dict[int, Measured]:
    return {
        one.case["devices"]: one
        for one in found
        if (one.case["command"], one.case["model"]) == ("plan", model)
    }


def table(found: list[Measured]) -> str:
    by_model = {name: plans_of(found, model) for name, model in MODELS.items()}
    by_model = {name: plans for name, plans in by_model.items() if plans}
    body = []
    for devices in by_model["70B"]:
        row = [f"{devices:,}"]
        here = [plans.get(devices) for plans in by_model.values()]
        row += [timed(one, "answer_s") if one else "" for one in here]
        largest = [one for one in here if one]
        row.append(f"{max(one['priced'] for one in largest):,.0f}")
        row.append(f"{max(one['peak_mb'] for one in largest):.0f} MB")
        body.append(row)
    names = [f"plan, {name}" for name in by_model]
    head = ["devices", *names, "configurations priced (max)", "peak process memory (max)"]
    text = rows(head, body)
    last = by_model["70B"]
    p = exponent(list(last), [one["answer_s"] for one in last.values()])
    imports = statistics.median(one["import_s"] for one in found)
    text += (
        f"\nFor the 70B model, time grows as devices to the power {p:.2f}. Imports take another"
        f" {seconds(imports)}. If a model does not fit, the time includes the search for a change"
        " that makes it fit.\n\n"
    )
    others = [one for one in found if one.case["command"] != "plan"]
    return text + rows(
        ["70B on", *COMMANDS[1:]],
        [
            [f"{n:,} devices"]
            + [timed(one, "answer_s") for one in others if one.case["devices"] == n]
            for n in sorted({one.case["devices"] for one in others})
        ],
    )


PART = Part(
    "Plan, estimate, what-if",
    _cases({"8B": SOME, "70B": DEVICES, "405B": SOME}, (64, 100_000)),
    _cases({"70B": (64, 100_000)}, (100_000,)),
    measure,
    table,
)
