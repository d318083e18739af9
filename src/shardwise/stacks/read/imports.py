"""Read a file of any supported stack as a run. Nothing in it is executed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from shardwise.spec.adapter import Adapter
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import Job
from shardwise.spec.lookup import Model
from shardwise.spec.read_file import parse_json, read_bytes, read_toml, reason_of
from shardwise.spec.record import Problems, Record, SpecError, SpecWarning
from shardwise.spec.run import RunSpec, default_seq_len
from shardwise.spec.strategy import Strategy
from shardwise.spec.train import DataSettings, TrainSettings
from shardwise.stacks.read.adapters import adapter_for
from shardwise.stacks.read.imported import Imported
from shardwise.stacks.read.objective import is_unplanned, objective_warning

if TYPE_CHECKING:
    from shardwise.stacks.read.source import Script

# Maximum size of a file. Configurations have a few kilobytes, scripts rarely a hundred.
MAX_BYTES = 2**22
_DEPTH = 50
_KNOWN = (
    "an accelerate, TRL, axolotl or LLaMA-Factory YAML, a DeepSpeed JSON, TrainingArguments or "
    "SFTConfig (JSON, YAML or script), a torchtitan configuration (Python or TOML), or a Python "
    "script with FSDP or DDP"
)
_SECTIONS: dict[type[Record], str] = {
    Strategy: "strategy",
    Job: "job",
    TrainSettings: "train",
    Adapter: "adapter",
    DataSettings: "data",
}


def import_file(path: Path) -> Imported:
    """Read a file of any supported stack; warn if its objective is not planned.

    Raises:
        SpecError: The file is not recognised, or its values are invalid in a run.
    """
    imported = _import(path)
    problems = Problems()
    parts: list[tuple[type[Record], dict[str, object]]] = [
        (Strategy, imported.strategy),
        # A file may omit the sequence length, which a Job needs.
        (Job, {"seq_len": 1, **imported.job}),
        (TrainSettings, imported.train),
    ]
    if imported.adapter:
        parts.append((Adapter, imported.adapter))
    if imported.data:
        parts.append((DataSettings, imported.data))
    for record, fields in parts:
        with problems.collect():
            record.read(fields, where=_SECTIONS[record])
    _check_machines(imported, problems)
    problems.raise_if_any()
    if imported.objective is not None and is_unplanned(imported):
        warning = f"import: {objective_warning(imported.objective)}"
        warnings.warn(warning, SpecWarning, stacklevel=2)
    return imported


def _check_machines(imported: Imported, problems: Problems) -> None:
    """Add a problem if the processes cannot be divided equally among the machines."""
    count, machines = imported.processes, imported.machines
    if count is not None and count % machines:
        problems.found.append(
            f"num_processes: {count} processes cannot be shared equally by {machines} machines; "
            "num_processes counts those of all machines, and must be a multiple of num_machines"
        )


def _import(path: Path) -> Imported:
    """Read a file by its ending and content: a script, JSON or YAML."""
    text = _text(path)
    kind = path.suffix.lower()
    try:
        if kind == ".py":
            from shardwise.stacks.read import torch_script

            return torch_script.read(text)
        if kind == ".toml":
            return _toml(path)
        return _table(_parsed(text, path), path)
    except (RecursionError, MemoryError):
        raise SpecError(f"import: {path} is nested too deeply for a configuration") from None


def _toml(path: Path) -> Imported:
    """Read a TOML, which is torchtitan's."""
    from shardwise.stacks.read import torchtitan_toml

    table = read_toml(path, "import")
    if not torchtitan_toml.is_torchtitan(table):
        raise SpecError(f"import: {path} is a TOML, but not torchtitan's; known are {_KNOWN}")
    return torchtitan_toml.read(table)


def _text(path: Path) -> str:
    """The text of a file; raises SpecError if it is no text or empty."""
    data = read_bytes(path, "import", MAX_BYTES)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise SpecError(f"import: {path} is not a text; known are {_KNOWN}") from None
    if "\0" in text:
        raise SpecError(f"import: {path} is not a text; known are {_KNOWN}")
    if not text.strip():
        raise SpecError(f"import: {path} is empty; known are {_KNOWN}")
    return text


def _json(text: str, path: Path) -> object:
    return parse_json(text, f"import: {path}")


def _yaml(text: str, path: Path) -> object:
    """The values of a YAML; anchors, tags and deep nesting are refused."""
    try:
        import yaml
    except ImportError:
        raise SpecError("import: reading YAML needs pyyaml; pip install pyyaml") from None

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    try:
        for event in yaml.parse(text, Loader=loader):
            # An alias of an alias of an alias is a megabyte of text and a terabyte of values.
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                raise SpecError(f"import: {path} uses anchors or aliases; write the values out")
            tag = getattr(event, "tag", None)
            if tag and tag != "!":
                raise SpecError(f"import: {path} uses the tag {tag[:60]!r}; write a plain value")
            if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
                depth += 1
            elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
                depth -= 1
            if depth > _DEPTH:
                raise SpecError(f"import: {path} is nested too deeply for a configuration")
        _check_keys(yaml.compose(text, Loader=loader), path)
        return yaml.load(text, Loader=loader)
    except yaml.YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", 0) + 1
        problem = getattr(error, "problem", None) or "it cannot be read"
        raise SpecError(f"import: {path} is not valid YAML: line {line}: {problem}") from None
    except ValueError as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(f"import: {path} is not valid YAML: {reason_of(error)}") from None


def _check_keys(node: Any, path: Path) -> None:
    """Raise SpecError for a key given twice: YAML would silently keep the last."""
    pending = [node]
    while pending:
        here = pending.pop()
        pairs = here.value if isinstance(getattr(here, "value", None), list) else []
        seen = set()
        for pair in pairs:
            if not isinstance(pair, tuple):
                pending.append(pair)
                continue
            if pair[0].value.__hash__ and pair[0].value in seen:
                raise SpecError(
                    f"import: {path} gives {str(pair[0].value)[:40]!r} twice; keep one of them"
                )
            seen |= {pair[0].value} if pair[0].value.__hash__ else set()
            pending.append(pair[1])


def _table(found: object, path: Path) -> Imported:
    """Read a table with the reader of the stack that it belongs to."""
    from shardwise.stacks.read.stack_files import STACK_FILES

    table = _keyed_by_text(found, path)
    for file in STACK_FILES.values():
        if file.fits(table):
            return file.read(table)
    raise SpecError(f"import: {path} is not recognised; known are {_KNOWN}")


def _keyed_by_text(found: object, path: Path) -> Mapping[str, object]:
    """What a file holds, if it is a table whose keys are texts; SpecError otherwise."""
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise SpecError(f"import: {path} holds no settings; known are {_KNOWN}")
    return found


def read_script(path: Path) -> Script | None:
    """The script of a file whose name ends in .py; None for other files."""
    from shardwise.stacks.read.source import Script

    return Script(_text(path)) if path.suffix.lower() == ".py" else None


def read_table(path: Path) -> Mapping[str, object]:
    """The table of a YAML or JSON of another stack, or the arguments in a script.

    Raises:
        SpecError: The file is not such a table.
    """
    text = _text(path)
    try:
        if path.suffix.lower() == ".py":
            from shardwise.stacks.read.source import Script
            from shardwise.stacks.read.trainer_script import table_of

            return table_of(Script(text))
        return _keyed_by_text(_parsed(text, path), path)
    except (RecursionError, MemoryError):
        raise SpecError(f"import: {path} is nested too deeply for a configuration") from None


def _parsed(text: str, path: Path) -> object:
    """The values of a JSON or YAML."""
    is_json = path.suffix.lower() == ".json" or text.lstrip().startswith("{")
    return _json(text, path) if is_json else _yaml(text, path)


def imported_cluster(imported: Imported) -> str | None:
    """The cluster, such as "1x4xCPU", if the file determines it; None otherwise.

    Only a file for CPUs that gives the number of processes does.
    """
    if not imported.cpu or imported.processes is None:
        return None
    return f"{imported.machines}x{imported.processes // imported.machines}xCPU"


class Missing(NamedTuple):
    """A part of a run that a file does not settle, so that the user must give it."""

    part: Literal["model", "cluster"]
    why: str
    example: str

    def words(self, option: str) -> str:
        """The sentence that asks for the part by an option, such as --model or model=."""
        return f"{self.part}: {self.why}; give {option}, such as {self.example}"


def missing_cluster(imported: Imported) -> Missing:
    """What the file says about the cluster, which it does not settle, with an example."""
    count = imported.processes
    if count is None:
        return Missing("cluster", "the file does not say on what it runs", "8xH100-SXM")
    per_node = max(1, count // imported.machines)
    network = "@400Gbps" if imported.machines > 1 else ""
    return Missing(
        "cluster",
        f"the file runs {count} processes but does not name their device",
        f"{imported.machines}x{per_node}xH100-SXM{network}",
    )


def imported_strategy(imported: Imported, devices: int) -> dict[str, object]:
    """The fields of the imported strategy, for a cluster with `devices` devices.

    If the number differs from the file's, shard groups keep their size and replicate follows.
    """
    fields = dict(imported.strategy)
    shard, replicate = fields.get("shard"), fields.get("replicate")
    if isinstance(shard, int) and isinstance(replicate, int):
        inner = Strategy.read(fields).mesh.inner
        if shard * replicate * inner != devices:
            # Shard groups keep their size; their number follows from the devices.
            del fields["replicate"]
    if fields["kind"] in ("single", "ddp"):
        fields["kind"] = "single" if devices == 1 else "ddp"
    return fields


def other_size(imported: Imported, cluster: ClusterSpec) -> str | None:
    """A sentence if the file's processes are not as many as the cluster's devices; or None."""
    count, devices = imported.processes, cluster.devices
    if count is None or count == devices:
        return None
    return (
        f"The file runs {count} processes, --cluster has {devices}: degrees and the global batch "
        "follow the cluster."
    )


def imported_run(imported: Imported, model: Model, cluster: ClusterSpec) -> RunSpec:
    """The run of an imported file, for a model and a cluster."""
    problems = Problems()
    job = strategy = train = data = None
    with problems.collect():
        job = Job.read({"seq_len": default_seq_len(model), **imported.job}, where="job")
    with problems.collect():
        strategy = Strategy.read(imported_strategy(imported, cluster.devices), where="strategy")
    with problems.collect():
        if imported.train:
            train = TrainSettings.read(imported.train, where="train")
    with problems.collect():
        if imported.adapter:
            model = model.but(adapter=adapter_for(imported.adapter, model))
    with problems.collect():
        if imported.data:
            data = DataSettings.read(imported.data, where="data")
    problems.raise_if_any()
    assert job is not None
    assert strategy is not None
    run = RunSpec(model, cluster, job, strategy, train, data)
    run.resolved()
    return run
