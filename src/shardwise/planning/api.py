"""The planning commands as Python functions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

from shardwise.predict.api import estimate_run
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.lookup import Model, find_cluster
from shardwise.spec.question import describe_run, read_base
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.spec.settings import PlanSettings, RunSettings, keywords
from shardwise.spec.states import parse_offload
from shardwise.spec.strategy import Loss, Strategy
from shardwise.spec.unequal import check_equal
from shardwise.step.profile import StepProfile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardwise.planning.money import Budget
    from shardwise.planning.plan import Objective, Plan
    from shardwise.planning.problem import Problem
    from shardwise.planning.space import Space
    from shardwise.planning.unequal import UnequalPlan
    from shardwise.planning.ways import Change
    from shardwise.planning.whatif import Point


# Seconds of steps, such as 3.2 or "3.2s", and folders of measured runs.
Measured: TypeAlias = "str | float | Path | Iterable[str | float | Path]"


@keywords(RunSettings)
def estimate(
    model: str | Model | None = None,
    cluster: str | ClusterSpec | None = None,
    strategy: str | Strategy | None = None,
    *,
    run: str | Path | RunSpec | None = None,
    measured: Measured = (),
    **settings: Unpack[RunSettings],
) -> StepProfile:
    """Predict memory, traffic and time of one configuration.

    Args:
        model: A preset ("llama-3-8b"), a Hugging Face config.json or model folder,
            "package.module:factory", or a ModelSpec.
        cluster: "4x8xH100-SXM@400Gbps" (nodes x GPUs x device @ network per GPU), a TOML
            file, or a Cluster.
        strategy: "ddp", "zero1", "zero2", "zero3", "hsdp", "zero3:8" (groups of 8), or a
            Strategy. Its fields, such as micro_batch or recompute, are keywords too.
        run: A run.toml or RunSpec to start from; the other arguments override it.
        measured: Seconds that steps of this configuration took, or folders of measured runs of
            the same software and device: they correct the times and narrow their interval.
        **settings: Fields of Job and Strategy; `precision` sets the dtypes.

    Raises:
        SpecError: The input is invalid; it lists every problem.

    Examples:
        >>> profile = shardwise.estimate("llama-3-8b", "8xH100-SXM", "zero3", micro_batch=2)
        >>> profile.memory.verdict, profile.time.step_s, profile.throughput.mfu
    """
    described = describe_run(model, cluster, strategy, run=run, **settings)
    return estimate_run(corrected_by_measured(described, measured))


@keywords(PlanSettings)
def plan(
    model: str | Model | None = None,
    cluster: str | ClusterSpec | None = None,
    *,
    run: str | Path | RunSpec | None = None,
    current: str | Path | None = None,
    objective: Objective = "throughput",
    low_precision_reduce: bool = False,
    batch_tolerance: float | None = None,
    budget: Budget | None = None,
    for_stack: str | None = None,
    measured: Measured = (),
    **settings: Unpack[PlanSettings],
) -> Plan:
    """Search all configurations for the best one; the Plan says which, and why.

    Args:
        model: As in `estimate`.
        cluster: As in `estimate`.
        run: A run.toml or RunSpec to start from; the plan is compared with its strategy.
        current: Compare with the strategy of this file instead: a run.toml, or a
            configuration of another stack.
        objective: "throughput", "memory" (least memory within 10 % of the fastest),
            "sequence" (longest sequence) or "money" (cheapest token).
        low_precision_reduce: Also try reducing gradients in the compute dtype.
        batch_tolerance: Share by which a step may differ from `global_batch` where that divides
            better: 0.05 by default, 0 keeps it exactly.
        budget: Tokens, price per GPU-hour and deadline.
        for_stack: Search only what this stack can run, such as "accelerate" or "deepspeed".
        measured: Seconds that steps of `run` took, or folders of measured runs, as in `estimate`.
        **settings: The job, the dtypes and compilation; the plan chooses everything else.

    Raises:
        SpecError: The input is invalid; it lists every problem.

    Examples:
        >>> plan = shardwise.plan("llama-3-8b", "8xH100-SXM", global_batch="1Mi")
        >>> plan.winner.strategy, plan.winner.tokens_per_s  # winner: None if none fits
    """
    found, _ = plan_run(
        model,
        cluster,
        run=run,
        current=current,
        objective=objective,
        low_precision_reduce=low_precision_reduce,
        batch_tolerance=batch_tolerance,
        budget=budget,
        for_stack=for_stack,
        measured=measured,
        **settings,
    )
    return found


@keywords(PlanSettings)
def whatif(
    model: str | Model | None = None,
    cluster: str | ClusterSpec | None = None,
    *,
    vary: Mapping[str, Iterable[object]],
    run: str | Path | RunSpec | None = None,
    **settings: Unpack[PlanSettings],
) -> dict[str, list[Point]]:
    """Plan again for other networks, memories, devices, sizes or lengths.

    Args:
        model: As in `estimate`.
        cluster: As in `estimate`.
        vary: Values by quantity: network (Gbps), memory (GiB), device, devices, seq_len,
            global_batch. Each quantity is varied alone.
        run: A run.toml or RunSpec to start from.
        **settings: As in `plan`.

    Returns:
        The points by quantity. The candidate of a point is its best configuration, or
        None if no configuration fits.

    Examples:
        >>> vary = {"network": [100, 200, 400]}
        >>> points = shardwise.whatif("llama-3-8b", "4x8xH100-SXM@400Gbps", vary=vary)["network"]
        >>> [(p.value, p.mfu) for p in points]
    """
    from shardwise.planning.problem import Problem
    from shardwise.planning.whatif import study

    if settings.get("offload"):
        raise SpecError("offload: whatif searches without offload; ask plan for each value instead")
    described = describe_run(model, cluster, run=run, planned=True, **settings)
    check_equal(described, "whatif", "ask plan_parts for each value instead")
    problem = Problem(described.model, described.cluster, described.job, described.strategy)
    return {
        name: study(problem, name.replace("_", "-"), [str(value) for value in values])
        for name, values in vary.items()
    }


def plan_run(
    model: str | Model | None = None,
    cluster: str | ClusterSpec | None = None,
    *,
    run: str | Path | RunSpec | None = None,
    current: str | Path | None = None,
    objective: Objective = "throughput",
    low_precision_reduce: bool = False,
    batch_tolerance: float | None = None,
    budget: Budget | None = None,
    for_stack: str | None = None,
    measured: Measured = (),
    in_full: bool = True,
    **settings: Any,
) -> tuple[Plan, RunSpec | None]:
    """Plan as `plan` does; also return the run to start, or None if none fits.

    `settings` are the keywords of `describe_run`; `in_full` is explained in `make_plan`.
    """
    from shardwise.planning.make import make_plan

    # What is offloaded restricts the search, and may not suit the strategy that it starts from.
    offload = parse_offload(settings.pop("offload", None))
    described = describe_run(model, cluster, run=run, planned=True, **settings)
    if described.cluster.parts is not None:
        check_equal(described, "plan", "use shardwise.plan_parts")
    described = described._replace(strategy=described.strategy.but(shares=None))
    if for_stack is not None:
        from shardwise.planning.in_stack import with_software_of
        from shardwise.stacks.experts import with_base_of

        described = with_base_of(for_stack, with_software_of(for_stack, described))
    described = _corrected_plan(described, run, measured)
    if run is not None and objective != "sequence":
        described = _with_batch_of(run, described)
    problem, space = _problem_and_space(
        described,
        settings.get("loss"),
        offload,
        low_precision_reduce,
        batch_tolerance,
        for_stack,
    )
    found = make_plan(
        problem,
        objective=objective,
        space=space,
        current=_compared(described, run, current),
        budget=budget,
        in_full=in_full,
    )
    if found.winner is None:
        return found, None
    chosen = described._replace(
        strategy=found.winner.strategy, job=found.problem.job, cluster=found.problem.cluster
    )
    return found, chosen


def _compared(
    described: RunSpec, run: str | Path | RunSpec | None, current: str | Path | None
) -> Strategy | None:
    """The strategy that a plan is compared with: that of `current`, else of the run; or None."""
    if current is None:
        return None if run is None else described.strategy
    from shardwise.planning.current import current_strategy

    return current_strategy(Path(current), described)


def has_parts(cluster: str | ClusterSpec | None, run: str | Path | RunSpec | None) -> bool:
    """Whether the cluster of a question has unequal parts."""
    if isinstance(cluster, str):
        # Joined here, or in a file.
        return "+" in cluster or (cluster.endswith(".toml") and bool(find_cluster(cluster).parts))
    if cluster is None:
        base = read_base(run, {})
        return base is not None and base.cluster.parts is not None
    return cluster.parts is not None


def refuse_for_parts(options: list[str]) -> None:
    """Raise SpecError if options were given that unequal parts are not planned with."""
    if options:
        raise SpecError(
            f"{options[0]}: is not known for unequal parts; leave it out, or name equal devices"
        )


@keywords(PlanSettings)
def plan_parts(
    model: str | Model | None = None,
    cluster: str | ClusterSpec | None = None,
    *,
    run: str | Path | RunSpec | None = None,
    batch_tolerance: float | None = None,
    measured: Measured = (),
    **settings: Unpack[PlanSettings],
) -> UnequalPlan:
    """Plan a cluster of unequal parts: a strategy, and the micro-batches of each part.

    Args:
        model: As in `estimate`.
        cluster: Parts joined by "+": "2xH100-SXM + 4xA100-80GB@100Gbps", or a file with parts.
        run: A run.toml or RunSpec to start from.
        batch_tolerance: As in `plan`.
        measured: Not for unequal parts.
        **settings: As in `plan`.

    Returns:
        The fastest configuration (`winner`; None if the parts do not pay together), its run
        (`chosen`), and each part alone.

    Raises:
        SpecError: The input is invalid, or the devices are equal.

    Examples:
        >>> found = shardwise.plan_parts("gpt2", "1x2xH100-SXM + 1x2xA100-80GB@100Gbps")
        >>> found.winner.strategy, found.gain
    """
    from shardwise.planning.batches import BATCH_TOLERANCE
    from shardwise.planning.unequal import plan_unequal

    offload = settings.pop("offload", None)
    given = {"--measured": measured, "--offload": offload}
    refuse_for_parts([name for name, value in given.items() if value])
    described = describe_run(model, cluster, run=run, planned=True, **settings)
    if run is not None:
        described = _with_batch_of(run, described)
    if described.cluster.parts is None:
        raise SpecError("cluster: plan_parts needs parts joined by +; use shardwise.plan")
    tolerance = BATCH_TOLERANCE if batch_tolerance is None else batch_tolerance
    return plan_unequal(described, loss=settings.get("loss"), tolerance=tolerance)


def _problem_and_space(
    run: RunSpec,
    loss: Loss | None,
    offload: bool | str,
    low_precision_reduce: bool,
    batch_tolerance: float | None,
    stack: str | None,
) -> tuple[Problem, Space]:
    """The problem and the search space of a plan; with a `stack`, only what this stack can run."""
    from shardwise.planning.batches import BATCH_TOLERANCE
    from shardwise.planning.problem import Problem
    from shardwise.planning.space import Space

    base = run.strategy
    dtypes = (base.reduce_dtype, base.param_dtype) if low_precision_reduce else ()
    space = Space(
        losses=(loss,) if loss else Space().losses,
        reduce_dtypes=tuple(dict.fromkeys(dtypes)),
        batch_tolerance=BATCH_TOLERANCE if batch_tolerance is None else batch_tolerance,
    ).offloading(offload)
    along_rows = False
    if stack is not None:
        from shardwise.planning.in_stack import within_stack
        from shardwise.stacks.write.exports import shards_along_rows

        base, space = within_stack(run, stack, space)
        along_rows = shards_along_rows(stack)
    return Problem(run.model, run.cluster, run.job, base, along_rows), space


def corrected_by_measured(run: RunSpec, measured: Measured) -> RunSpec:
    """The run with its cluster's step times corrected by measured steps; unchanged without any."""
    steps = [measured] if isinstance(measured, str | float | int | Path) else list(measured)
    if not steps:
        return run
    from shardwise.observe.measured import with_measured

    return with_measured(run, steps)


def _corrected_plan(
    described: RunSpec, run: str | Path | RunSpec | None, measured: Measured
) -> RunSpec:
    """The described run with its cluster corrected by measured steps of `run` or of run folders."""
    if not measured:
        return described
    base = read_base(run, {})
    if base is None:
        base = described
        steps = [measured] if isinstance(measured, str | float | int | Path) else list(measured)
        if not all(Path(str(step)).is_dir() for step in steps):
            raise SpecError(
                "measured: name the run whose step it is: plan run.toml --measured 3.2s; or give "
                "the folder of a run"
            )
    cluster = corrected_by_measured(base._replace(cluster=described.cluster), measured).cluster
    return described._replace(cluster=cluster)


def _with_batch_of(run: str | Path | RunSpec, described: RunSpec) -> RunSpec:
    """The described run, with the tokens per step of `run` as its global batch.

    Unchanged if a global batch is given, or if `run` sets neither micro_batch nor accumulate.
    """
    base = read_base(run, {})
    chosen = base is not None and {"micro_batch", "accumulate"} & base.strategy.model_fields_set
    if described.job.global_batch is not None or base is None or not chosen:
        return described
    tokens = base.job.tokens_per_step(base.resolved(planned=True).strategy)
    return described._replace(job=described.job.but(global_batch=tokens))


def changes_to_fit_run(run: RunSpec) -> list[Change]:
    """List changes after which a run that does not fit would fit."""
    from shardwise.planning.problem import Problem, Units
    from shardwise.planning.space import Space
    from shardwise.planning.ways import changes_to_fit

    problem = Problem(run.model, run.cluster, run.job, run.strategy)
    return changes_to_fit(problem, run.strategy, Space(), Units(problem))
