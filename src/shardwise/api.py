"""The planning commands as Python functions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

from shardwise.predict.estimate import price
from shardwise.spec.adapter import Adapter, read_adapter
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import Job
from shardwise.spec.lookup import ON_DISK, Lookup, Model
from shardwise.spec.model import ModelSpec
from shardwise.spec.read_file import read_toml
from shardwise.spec.record import Problems, SpecError
from shardwise.spec.run import RunSpec, default_seq_len, default_strategy, read_run
from shardwise.spec.settings import PlanSettings, RunSettings, keywords
from shardwise.spec.software import find_software, software_of_stack
from shardwise.spec.strategy import Strategy, parse_precision, parse_strategy
from shardwise.step.profile import StepProfile
from shardwise.units.load import load_units

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardwise.planning.money import Budget
    from shardwise.planning.plan import Objective, Plan
    from shardwise.planning.space import Space
    from shardwise.planning.ways import Change
    from shardwise.planning.whatif import Point
    from shardwise.timeline.spans import Timeline


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
    return estimate_run(corrected(described, measured))


def corrected(run: RunSpec, measured: Measured) -> RunSpec:
    """The run with what measured steps say of its cluster and software, if there are any."""
    steps = [measured] if isinstance(measured, str | float | int | Path) else list(measured)
    if not steps:
        return run
    from shardwise.observe.measured import with_measured

    return with_measured(run, steps)


def estimate_run(run: RunSpec, stack: str | None = None) -> StepProfile:
    """Predict memory, traffic and time of a run whose strategy is resolved.

    `stack` names the stack that runs it, if that is not Shardwise.
    """
    units = load_units(run.model, run.job.seq_len, run.strategy)
    if stack is not None:
        from shardwise.stacks.write.exports import shards_along_rows

        units = units.sharded_along_rows() if shards_along_rows(stack) else units
    origin = "formulas" if isinstance(run.model, ModelSpec) else "traced module"
    return price(units, run.strategy, run.cluster, run.job, origin)


def replay_run(run: RunSpec) -> Timeline | None:
    """Simulate one step, stream by stream; None where the cluster's rates are unknown."""
    from shardwise.predict.replay import replay

    units = load_units(run.model, run.job.seq_len, run.strategy)
    return replay(units, run.strategy, run.cluster, run.job)


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

    described = describe_run(model, cluster, run=run, planned=True, **settings)
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

    `settings` are those of `describe_run`, and `in_full` that of `make_plan`.
    """
    from shardwise.planning.batches import BATCH_TOLERANCE
    from shardwise.planning.plan import make_plan
    from shardwise.planning.problem import Problem
    from shardwise.planning.space import Space

    described = describe_run(model, cluster, run=run, planned=True, **settings)
    if for_stack is not None:
        described = _with_software_of(for_stack, described)
    described = _corrected_plan(described, run, measured)
    if run is not None and objective != "sequence":
        described = _with_batch_of(run, described)
    base = described.strategy
    dtypes = (base.reduce_dtype, base.param_dtype) if low_precision_reduce else ()
    given = settings.get("loss")
    space = Space(
        losses=(given,) if given else Space().losses,
        reduce_dtypes=tuple(dict.fromkeys(dtypes)),
        batch_tolerance=BATCH_TOLERANCE if batch_tolerance is None else batch_tolerance,
    )
    along_rows = False
    if for_stack is not None:
        from shardwise.stacks.write.exports import shards_along_rows

        base, space = _within_stack(described, for_stack, space)
        along_rows = shards_along_rows(for_stack)
    problem = Problem(described.model, described.cluster, described.job, base, along_rows)
    compared = None if run is None else described.strategy
    if current is not None:
        compared = _current(Path(current), described)
    found = make_plan(
        problem,
        objective=objective,
        space=space,
        current=compared,
        budget=budget,
        in_full=in_full,
    )
    if found.winner is None:
        return found, None
    chosen = described._replace(
        strategy=found.winner.strategy, job=found.problem.job, cluster=found.problem.cluster
    )
    return found, chosen


def _corrected_plan(
    described: RunSpec, run: str | Path | RunSpec | None, measured: Measured
) -> RunSpec:
    """The run to plan with, on a cluster that knows measured steps of `run` or of folders."""
    if not measured:
        return described
    base = _read_base(run, {})
    if base is None:
        base = described
        steps = [measured] if isinstance(measured, str | float | int | Path) else list(measured)
        if not all(Path(str(step)).is_dir() for step in steps):
            raise SpecError(
                "measured: name the run whose step it is: plan run.toml --measured 3.2s; or give "
                "the folder of a run"
            )
    cluster = corrected(base._replace(cluster=described.cluster), measured).cluster
    return described._replace(cluster=cluster)


def _with_batch_of(run: str | Path | RunSpec, described: RunSpec) -> RunSpec:
    """The described run with the tokens per step of the run it starts from as its batch.

    Who has a run has chosen its batch, also where accumulation says it and no `global_batch`.
    """
    base = _read_base(run, {})
    chosen = base is not None and {"micro_batch", "accumulate"} & base.strategy.model_fields_set
    if described.job.global_batch is not None or base is None or not chosen:
        return described
    tokens = base.job.tokens_per_step(base.resolved(planned=True).strategy)
    return described._replace(job=described.job.but(global_batch=tokens))


def _within_stack(run: RunSpec, stack: str, space: Space) -> tuple[Strategy, Space]:
    """The base strategy and the space of a search among what a stack runs."""
    from shardwise.stacks.limits import LEAVES_OUT, StackLimits

    limits = StackLimits(run, stack)
    base = limits.base(run.strategy)
    return base, space._replace(
        recompute=limits.choices("recompute", space.recompute),
        prefetch=limits.choices("prefetch", space.prefetch),
        forward_prefetch=limits.choices("forward_prefetch", space.forward_prefetch),
        blocks_per_unit=limits.choices("blocks_per_unit", space.blocks_per_unit),
        losses=limits.choices("loss", space.losses),
        reduce_dtypes=limits.choices("reduce_dtype", space.reduce_dtypes),
        allowed=limits.allowed,
        applied=limits.applied,
        has_optimizer=limits.has_optimizer,
        trains=limits.trains,
        leaves_out=LEAVES_OUT.get(stack, ()),
        adapted=lambda adapter: _adapted_within_stack(run, stack, space, adapter),
    )


def _with_software_of(stack: str, run: RunSpec) -> RunSpec:
    """The run with the kernels that a stack calls, where nobody said which."""
    software = software_of_stack(stack)
    if run.cluster.software is not None or software is None:
        return run
    return run._replace(cluster=run.cluster.but(software=software))


def _adapted_within_stack(
    run: RunSpec, stack: str, space: Space, adapter: Adapter
) -> tuple[Strategy, Space] | None:
    """The same of a run with an adapter; None where the stack cannot express it."""
    from shardwise.stacks.limits import expresses

    adapted = run._replace(model=run.model.but(adapter=adapter))
    return _within_stack(adapted, stack, space) if expresses(adapted, stack, "adapter") else None


def _current(path: Path, described: RunSpec) -> Strategy:
    """Read the strategy of a run.toml or another stack's file, resolved for the described run."""
    from shardwise.stacks.read.imports import import_file, imported_strategy

    devices = described.cluster.devices
    if path.suffix == ".toml":
        section = read_toml(path, "current").get("strategy")
        if not isinstance(section, (str, dict)):
            raise SpecError(f"current: {path} has no [strategy]; give a run.toml that has one")
        fields = parse_strategy(section) if isinstance(section, str) else section
    else:
        fields = imported_strategy(import_file(path), devices)
    strategy = Strategy.read(fields, where="current")
    # Degrees of the file fit only the cluster of the file.
    if strategy.replicate is not None and strategy.devices != devices:
        strategy = strategy.unplaced()
    return described._replace(strategy=strategy).resolved().strategy


def read_budget(
    tokens: str | int | None = None,
    price: str | float | None = None,
    deadline_days: float | None = None,
) -> Budget:
    """Read a budget: tokens such as "1T", a price per device-hour, a deadline in days.

    `price` is a number, or one per device: "H100-SXM=2.5,A100-80GB=1.6".
    """
    from shardwise.planning.money import DAY, Budget, read_price
    from shardwise.spec.quantity import QuantityError, parse_count

    problems = Problems()
    count = rate = None
    if deadline_days is not None and tokens is None:
        problems.found.append("deadline: needs --tokens, such as --tokens 1T")
    if deadline_days is not None and not 0 < deadline_days < 1e6:
        problems.found.append(
            f"deadline: {deadline_days:g} days is out of range; give days above 0"
        )
    with problems.collect():
        rate = read_price(price) if price is not None else None
    with problems.collect():
        try:
            count = parse_count(str(tokens)) if tokens is not None else None
        except QuantityError as error:
            raise SpecError(f"tokens: {error}") from None
        if count is not None and count < 1:
            raise SpecError("tokens: must be at least 1; write it like 300B or 1T")
    problems.raise_if_any()
    return Budget(count, rate, None if deadline_days is None else deadline_days * DAY)


def start_command(cluster: ClusterSpec, run: Path) -> str:
    """The shell command that starts a run on a cluster."""
    if cluster.nodes == 1:
        return f"shardwise train {run} --nproc {cluster.devices_per_node}"
    return (
        f"torchrun --nnodes {cluster.nodes} --nproc-per-node {cluster.devices_per_node} "
        f"--rdzv-backend c10d --rdzv-endpoint HOST:29400 -m shardwise train {run}"
    )


def ways_for(run: RunSpec) -> list[Change]:
    """List changes after which a run that does not fit would fit."""
    from shardwise.planning.problem import Problem, Units
    from shardwise.planning.space import Space
    from shardwise.planning.ways import ways_to_fit

    problem = Problem(run.model, run.cluster, run.job, run.strategy)
    return ways_to_fit(problem, run.strategy, Space(), Units(problem))


def describe_run(
    model: str | Model | None = None,
    cluster: str | ClusterSpec | None = None,
    strategy: str | Strategy | None = None,
    *,
    run: str | Path | RunSpec | None = None,
    seq_len: int | str | None = None,
    global_batch: int | str | None = None,
    optimizer: str | None = None,
    precision: str | None = None,
    adapter: str | Adapter | None = None,
    software: str | None = None,
    planned: bool = False,
    resolved: bool = True,
    lookup: Lookup = ON_DISK,
    **settings: object,
) -> RunSpec:
    """Combine names, a run.toml and single settings into a resolved run.

    `settings` are fields of Strategy; values may be text, as a command line gives them. With
    `planned` the strategy is only what a plan starts from. Without `resolved`, degrees that nobody
    set stay open, for clusters of several sizes. `lookup` reads names. Raises one SpecError that
    lists every problem.
    """
    base = _read_base(run, {"model": model, "cluster": cluster})
    problems = Problems()
    chosen_model = base.model if base else None
    chosen_cluster = base.cluster if base else None
    with problems.collect():
        if model is not None:
            chosen_model = lookup.model(model) if isinstance(model, str) else model
            if not isinstance(chosen_model, Model):
                raise SpecError(f"model: expected a name, path or ModelSpec, not {model!r}")
    with problems.collect():
        if adapter is not None and chosen_model is not None:
            chosen_model = chosen_model.but(adapter=read_adapter(adapter))
    with problems.collect():
        if cluster is not None:
            chosen_cluster = lookup.cluster(cluster) if isinstance(cluster, str) else cluster
    with problems.collect():
        if software is not None and chosen_cluster is not None:
            chosen_cluster = chosen_cluster.but(software=find_software(software).name)
    if chosen_model is None and model is None:
        problems.found.append("model: is required, such as --model llama-3-8b")
    if chosen_cluster is None and cluster is None:
        problems.found.append("cluster: is required, such as --cluster 8xH100-SXM")

    # A kind that cannot be read must not hide problems of the other settings.
    fields: dict[str, object] = {"kind": "zero3"}
    with problems.collect():
        fields |= _strategy_fields(strategy, base, chosen_cluster)
    with problems.collect():
        fields |= parse_precision(precision) if precision is not None else {}
    fields |= {name: value for name, value in settings.items() if value is not None}
    with problems.collect():
        chosen_strategy = Strategy.read(fields, where="strategy")

    job_fields: dict[str, object] = base.job.model_dump() if base else {}
    given = {"seq_len": seq_len, "global_batch": global_batch, "optimizer": optimizer}
    job_fields |= {name: value for name, value in given.items() if value is not None}
    if settings.get("accumulate") is not None:
        if global_batch is not None:
            problems.found.append("accumulate: follows from global_batch; give one of the two")
        job_fields.pop("global_batch", None)
    if chosen_model is not None:
        job_fields.setdefault("seq_len", default_seq_len(chosen_model))
    job_fields.setdefault("seq_len", 1)
    with problems.collect():
        job = Job.read(job_fields, where="job")
    problems.raise_if_any()
    assert chosen_model is not None
    assert chosen_cluster is not None
    described = RunSpec(
        model=chosen_model,
        cluster=chosen_cluster,
        job=job,
        strategy=chosen_strategy,
        train=base.train if base else None,
        data=base.data if base else None,
    )
    return described.resolved(planned=planned) if resolved else described


def _read_base(run: str | Path | RunSpec | None, named: Mapping[str, object]) -> RunSpec | None:
    """The run to start from; sections that are named otherwise are not read from its file."""
    if not isinstance(run, (str, Path)):
        return run
    # Paths are relative to the caller's folder, not to that of the run.toml.
    sections = {
        name: str(Path(value).resolve()) if "/" in value or value.endswith(".toml") else value
        for name, value in named.items()
        if isinstance(value, str)
    }
    return read_run(Path(run), sections)


def _strategy_fields(
    strategy: str | Strategy | None, base: RunSpec | None, cluster: ClusterSpec | None
) -> dict[str, object]:
    if isinstance(strategy, Strategy):
        return strategy.model_dump()
    inherited: dict[str, object] = {}
    if base:
        # Degrees belong to the cluster of the file.
        whole = base.strategy.replicate is not None
        moved = cluster is not None and (
            cluster.devices != base.cluster.devices
            or (whole and base.strategy.devices != cluster.devices)
        )
        inherited = (base.strategy.unplaced() if moved else base.strategy).model_dump()
    if isinstance(strategy, str):
        if not base:
            return parse_strategy(strategy)
        return base.strategy.as_kind(strategy).model_dump()
    if inherited:
        return inherited
    return default_strategy(cluster).model_dump()
