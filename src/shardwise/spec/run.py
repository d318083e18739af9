"""run.toml: one file that defines a run, read with every problem at once, and written back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.spec import catalogue
from shardwise.spec.adapter import Adapter, read_adapter
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.foreign_text import cut
from shardwise.spec.hub import check_weights
from shardwise.spec.job import Job
from shardwise.spec.lookup import (
    ConfigRef,
    Model,
    ModuleRef,
    cluster_from_table,
    cluster_table,
    config_folder,
    find_cluster,
    find_config,
    find_model,
    find_preset,
)
from shardwise.spec.model import ModelSpec
from shardwise.spec.read_file import read_toml
from shardwise.spec.record import Problems, SpecError, did_you_mean
from shardwise.spec.strategy import Strategy, parse_strategy
from shardwise.spec.toml_text import toml_text

if TYPE_CHECKING:
    from shardwise.spec.evaluation import EvalSettings
    from shardwise.spec.train import DataSettings, TrainSettings

DEFAULT_SEQ_LEN = 4096
SECTIONS = ("model", "adapter", "cluster", "job", "strategy", "train", "data", "eval")


_MODEL_SOURCES = ("preset", "config", "pretrained", "factory")


class RunSpec(NamedTuple):
    """A run: model, cluster, job, strategy and training settings. Parts validate themselves."""

    model: Model
    cluster: ClusterSpec
    job: Job
    strategy: Strategy
    # None unless the file has these sections: planning needs none of them.
    train: TrainSettings | None = None
    data: DataSettings | None = None
    eval: EvalSettings | None = None

    @property
    def adapter(self) -> Adapter | None:
        """The model's adapter; None if all parameters are trained."""
        return self.model.adapter

    def from_weights(self) -> RunSpec:
        """The run, set to start from the model's weights if there is an adapter and weights.

        Weights are safetensors files in the folder of the model's config.
        """
        config = getattr(self.model, "config", None)
        if self.adapter is None or config is None:
            return self
        if not any(config_folder(config).glob("model*.safetensors")):
            return self
        return self._replace(model=self.model.but(pretrained=True))

    def resolved(self, *, planned: bool = False) -> RunSpec:
        """The run with every unset field of the strategy decided for the cluster.

        With `planned`, the strategy is only the starting point of a plan, so it may not fit the
        global batch.
        """
        strategy = self.strategy.resolve(self.cluster.devices, self.cluster.devices_per_node)
        blocks = getattr(self.model, "layers", None)
        if blocks is not None and strategy.blocks_per_unit > blocks:
            raise SpecError(
                f"strategy.blocks_per_unit: {strategy.blocks_per_unit} is more than the {blocks} "
                f"blocks of {self.model.name}; set at most {blocks}"
            )
        if strategy.split_root and getattr(self.model, "tied", False):
            raise SpecError(
                f"strategy.split_root: embedding and head of {self.model.name} are tied, so they "
                "belong in one unit; leave split_root out"
            )
        try:
            strategy = self.job.split(strategy)
        except SpecError:
            if not planned:
                raise
        return self._replace(strategy=strategy, cluster=catalogue.with_memory_here(self.cluster))


def read_run(path: str | Path, given: Mapping[str, str] | None = None) -> RunSpec:
    """Read a run.toml. Raises one SpecError that lists the problems of all sections.

    `given` holds shorthands for sections that the file may leave out, such as a cluster.
    """
    path = Path(path)
    data = {**(given or {}), **read_toml(path, "run")}
    return run_from_dict(data, base=path.parent)


def run_from_dict(data: dict[str, Any], base: Path | None = None) -> RunSpec:
    """A RunSpec from sections, each a table or a shorthand text, if the section has one.

    Paths are relative to `base`. Raises one SpecError that lists every problem.
    """
    problems = Problems()
    data, loss = _without_loss(data)
    for key in data:
        if key not in SECTIONS:
            hint = did_you_mean(key, SECTIONS) or f"; known are {', '.join(SECTIONS)}"
            problems.found.append(f"{cut(key, 60)}: unknown section{hint}")
    parts: dict[str, Any] = {}
    readers: dict[str, Callable[[Any], object]] = {
        "model": lambda section: _model(section, base),
        "adapter": read_adapter,
        "cluster": lambda section: _cluster(section, base),
        "job": lambda section: Job.read(_table(section, "job"), where="job"),
        "strategy": _strategy,
        "train": _train,
        "data": lambda section: _data(section, base),
        "eval": lambda section: _eval(section, parts.get("data"), base),
    }
    for name, read in readers.items():
        with problems.collect():
            if name in data:
                parts[name] = read(data[name])
            elif name in ("model", "cluster"):
                raise SpecError(f"{name}: section is required")
    problems.raise_if_any()
    if "adapter" in parts:
        parts["model"] = parts["model"].but(adapter=parts.pop("adapter"))
    parts.setdefault("job", Job(seq_len=default_seq_len(parts["model"])))
    parts.setdefault("strategy", default_strategy(parts["cluster"]))
    if loss is not None:
        fields = parts["strategy"].model_dump()
        parts["strategy"] = Strategy.read({**fields, "loss": loss}, where="job")
    return RunSpec(**parts)


def _without_loss(data: dict[str, Any]) -> tuple[dict[str, Any], object]:
    """The sections without `job.loss`, which is accepted for `strategy.loss`; and its value."""
    job = data.get("job")
    if not isinstance(job, dict) or "loss" not in job:
        return data, None
    rest = {name: value for name, value in job.items() if name != "loss"}
    sections = {**data, "job": rest} if rest else {n: v for n, v in data.items() if n != "job"}
    return sections, job["loss"]


def check_loss(run: RunSpec) -> None:
    """Raise SpecError for a loss in the head of a user's own module, whose head is unknown."""
    loss = run.strategy.loss
    if loss != "plain" and isinstance(run.model, ModuleRef):
        raise SpecError(
            f"strategy.loss: {loss} needs a model that transformers builds from its configuration; "
            f'{run.model.factory} is a function of your own: set loss = "plain"'
        )


def default_seq_len(model: Model) -> int:
    """The default sequence length: 4,096 tokens, or the model's positions if fewer."""
    return min(DEFAULT_SEQ_LEN, getattr(model, "max_positions", DEFAULT_SEQ_LEN))


def default_strategy(cluster: ClusterSpec | None) -> Strategy:
    """The default strategy: single on a cluster of one device, else zero3."""
    alone = cluster is not None and cluster.devices == 1
    return Strategy(kind="single" if alone else "zero3")


def _table(section: object, name: str) -> dict[str, Any]:
    """The section if it is a table; SpecError otherwise."""
    if not isinstance(section, dict):
        raise SpecError(f"{name}: must be a table, not {section!r}")
    return section


def _model(section: object, base: Path | None) -> Model:
    if isinstance(section, str):
        return find_model(section, base)
    table = dict(_table(section, "model"))
    # `pretrained` is a flag in files written by `write_run`, else a folder to start from.
    flag = isinstance(table.get("pretrained"), bool)
    if flag and "config" in table and "family" not in table:
        found = find_config(str(table["config"]), base)
        return found.but(pretrained=table["pretrained"])
    starts = [key for key in _MODEL_SOURCES if key in table and "family" not in table]
    if len(starts) > 1:
        raise SpecError(f"model: give one of {', '.join(starts)}, not several")
    if not starts:
        return ModelSpec.read(table, where="model")
    start = table.pop(starts[0])
    if not isinstance(start, str):
        raise SpecError(f"model.{starts[0]}: must be a text, not {start!r}")
    if starts[0] == "factory":
        return ModuleRef.read({"factory": start, **table}, where="model")
    if starts[0] == "pretrained" and table:
        raise SpecError(f"model: pretrained weights fix its sizes; leave out {', '.join(table)}")
    named = find_preset(start) if starts[0] == "preset" else find_config(start, base)
    if starts[0] == "pretrained":
        check_weights(Path(str(named.config)))
    return _with_changes(named, table, pretrained=starts[0] == "pretrained")


def _with_changes(found: ModelSpec | ConfigRef, table: dict[str, Any], pretrained: bool) -> Model:
    """A named model with the other fields of its table applied."""
    if pretrained:
        return found.but(pretrained=True)
    if not table:
        return found
    if isinstance(found, ConfigRef):
        raise SpecError(f"model: change {', '.join(table)} in {found.config} itself")
    return ModelSpec.read({**found.model_dump(exclude={"config"}), **table}, where="model")


def _cluster(section: object, base: Path | None) -> ClusterSpec:
    if isinstance(section, str):
        return find_cluster(section, base)
    return cluster_from_table(_table(section, "cluster"))


def _strategy(section: object) -> Strategy:
    if isinstance(section, str):
        return Strategy.read(parse_strategy(section), where="strategy")
    return Strategy.read(_table(section, "strategy"), where="strategy")


def _train(section: object) -> TrainSettings:
    from shardwise.spec.train import TrainSettings

    return TrainSettings.read(_table(section, "train"), where="train")


def _data(section: object, base: Path | None) -> DataSettings:
    from shardwise.spec.train import DataSettings

    return _with_paths(DataSettings.read(_table(section, "data"), where="data"), base)


def _with_paths(data: DataSettings, base: Path | None) -> DataSettings:
    """The settings with paths of files and tokenizer relative to `base`."""
    paths = tuple(str((base or Path()) / path) for path in data.path)
    tokenizer = data.tokenizer
    if tokenizer != "bytes":
        tokenizer = str((base or Path()) / tokenizer)
    return data.but(path=paths, tokenizer=tokenizer)


def _eval(section: object, training: DataSettings | None, base: Path | None) -> EvalSettings:
    """The section, with keys of its data that are not given taken from the `training` data."""
    from shardwise.spec.evaluation import EvalSettings

    found = EvalSettings.read(_table(section, "eval"), where="eval")
    data = _with_paths(found.data, base)
    if training is not None:
        given = {key: getattr(data, key) for key in found.data.model_fields_set}
        data = training.but(**{"path": (), "source": None, **given})
    if data.synthetic and training is not None and not training.synthetic:
        raise SpecError("eval.data: is missing; name files that the run does not train on")
    return found.but(data=data)


def write_run(run: RunSpec, comments: Iterable[str] = ()) -> str:
    """The text of a run.toml, after comment lines; `read_run` reads it back to an equal RunSpec."""
    return toml_text(run_table(run), comments)


def replace_run(path: Path, run: RunSpec) -> None:
    """Overwrite a run.toml; a first line that names its schema to editors is kept."""
    old = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    first = old.partition("\n")[0].rstrip()
    line = f"{first}\n" if first.startswith("#:schema ") else ""
    path.write_text(line + write_run(run), encoding="utf-8")


def run_table(run: RunSpec) -> dict[str, Any]:
    """The sections of a run.toml as plain values."""
    parts = {name: getattr(run, name) for name in SECTIONS}
    data = {
        name: part.model_dump(mode="json", exclude_none=True)
        for name, part in parts.items()
        if part is not None
    }
    data["model"].pop("adapter", None)
    if isinstance(run.model, ConfigRef) and run.model.preset is not None:
        data["model"] = {"preset": run.model.preset}
    return {**data, "cluster": cluster_table(run.cluster)}
