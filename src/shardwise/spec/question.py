"""Describe a run by names, a run.toml and single settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardwise.spec.adapter import Adapter, with_adapter
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.hub import hub_name
from shardwise.spec.job import Job
from shardwise.spec.lookup import DISK_LOOKUP, Lookup, Model
from shardwise.spec.precision import parse_precision
from shardwise.spec.record import Problems, SpecError
from shardwise.spec.run import RunSpec, default_seq_len, default_strategy, read_run
from shardwise.spec.shares import shares_of
from shardwise.spec.software import find_software
from shardwise.spec.states import parse_states
from shardwise.spec.strategy import Strategy, parse_strategy


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
    states: str | None = None,
    adapter: str | Adapter | None = None,
    software: str | None = None,
    planned: bool = False,
    resolved: bool = True,
    lookup: Lookup = DISK_LOOKUP,
    **settings: object,
) -> RunSpec:
    """Combine names, a run.toml and single settings into a resolved run.

    `settings` are fields of Strategy and other fields of Job; values may be text, as on a command
    line. With `planned`, the strategy is only the starting point of a plan. Without `resolved`,
    degrees that are not set stay open, for clusters of several sizes. `lookup` reads names. Raises
    one SpecError that lists every problem.
    """
    base = read_base(run, {"model": model, "cluster": cluster})
    problems = Problems()
    chosen_model = base.model if base else None
    chosen_cluster = base.cluster if base else None
    with problems.collect():
        chosen_model = _model(model, lookup) if model is not None else chosen_model
    with problems.collect():
        if adapter is not None and chosen_model is not None:
            own = chosen_model.adapter
            given_adapter = with_adapter(own, adapter) if isinstance(adapter, str) else adapter
            chosen_model = chosen_model.but(adapter=given_adapter)
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
    of_job = {name: settings.pop(name) for name in Job.model_fields if name in settings}
    dtypes = _dtypes(precision, states, problems)
    chosen_strategy = _strategy(strategy, dtypes, settings, base, chosen_cluster, problems)
    given = {"seq_len": seq_len, "global_batch": global_batch, "optimizer": optimizer, **of_job}
    job = _job(given, settings.get("accumulate"), base, chosen_model, problems)
    problems.raise_if_any()
    assert chosen_model is not None
    assert chosen_cluster is not None
    assert chosen_strategy is not None
    assert job is not None
    described = RunSpec(
        model=chosen_model,
        cluster=chosen_cluster,
        job=job,
        strategy=chosen_strategy,
        train=base.train if base else None,
        data=base.data if base else None,
    )
    return described.resolved(planned=planned) if resolved else described


def _model(model: str | Model, lookup: Lookup) -> Model:
    """The model by name or as given; SpecError for another type."""
    chosen = lookup.model(model) if isinstance(model, str) else model
    if not isinstance(chosen, Model):
        raise SpecError(f"model: expected a name, path or ModelSpec, not {model!r}")
    return chosen


def _strategy(
    strategy: str | Strategy | None,
    dtypes: Mapping[str, object],
    settings: Mapping[str, object],
    base: RunSpec | None,
    cluster: ClusterSpec | None,
    problems: Problems,
) -> Strategy | None:
    """The strategy with dtypes and single settings applied, in this order; None on problems."""
    # An invalid kind must not hide problems of other settings.
    fields: dict[str, object] = {"kind": "zero3"}
    with problems.collect():
        fields |= _strategy_fields(strategy, base, cluster)
    fields |= dtypes
    fields |= {name: value for name, value in settings.items() if value is not None}
    if isinstance(fields.get("shares"), str) and cluster is not None:
        with problems.collect():
            counts, parts = str(fields.pop("shares")), cluster.parts or ()
            fields.pop("accumulate", None)
            by_part = [part.devices for part in parts] or [1] * cluster.devices
            fields["shares"] = shares_of(counts, by_part)
    with problems.collect():
        return Strategy.read(fields, where="strategy")
    return None


def _dtypes(precision: str | None, states: str | None, problems: Problems) -> Mapping[str, object]:
    """The strategy fields of `--precision` and `--states`, without those that are invalid."""
    fields: dict[str, object] = {}
    with problems.collect():
        fields |= parse_precision(precision) if precision is not None else {}
    with problems.collect():
        fields |= parse_states(states) if states is not None else {}
    return fields


def _job(
    given: Mapping[str, object],
    accumulate: object,
    base: RunSpec | None,
    model: Model | None,
    problems: Problems,
) -> Job | None:
    """The base run's job with the `given` fields; None on problems.

    A given accumulation removes the base run's global batch.
    """
    fields: dict[str, object] = base.job.model_dump() if base else {}
    fields |= {name: value for name, value in given.items() if value is not None}
    if accumulate is not None:
        if given["global_batch"] is not None:
            problems.found.append("accumulate: follows from global_batch; give one of the two")
        fields.pop("global_batch", None)
    if model is not None:
        fields.setdefault("seq_len", default_seq_len(model))
    fields.setdefault("seq_len", 1)
    with problems.collect():
        return Job.read(fields, where="job")
    return None


def read_base(run: str | Path | RunSpec | None, named: Mapping[str, object]) -> RunSpec | None:
    """The run to start from; None without one.

    `named` holds texts of model and cluster, for sections that its file does not have.
    """
    if not isinstance(run, (str, Path)):
        return run
    # Paths are relative to the caller's folder, not to that of the run.toml.
    sections = {
        name: str(Path(value).resolve()) if _is_path(value) else value
        for name, value in named.items()
        if isinstance(value, str)
    }
    return read_run(Path(run), sections)


def _is_path(text: str) -> bool:
    """Whether the text of a model or a cluster is a path; a name on a hub is one if it exists."""
    if hub_name(text) is not None:
        return Path(text).exists()
    return "/" in text or text.endswith(".toml")


def _strategy_fields(
    strategy: str | Strategy | None, base: RunSpec | None, cluster: ClusterSpec | None
) -> dict[str, object]:
    """The fields of the given strategy, else of the base run's, else of the default strategy."""
    if isinstance(strategy, Strategy):
        return strategy.model_dump()
    inherited: dict[str, object] = {}
    if base:
        # Degrees of the file are valid only for the file's own cluster.
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
