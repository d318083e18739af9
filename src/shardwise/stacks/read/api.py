"""Read a file of another stack as a run, from Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.lookup import Model, find_cluster, find_model
from shardwise.spec.record import Problems, SpecError
from shardwise.spec.run import RunSpec
from shardwise.stacks.outcomes import Outcome, repr_text
from shardwise.stacks.read.imported import Imported
from shardwise.stacks.read.imports import (
    Missing,
    import_file,
    imported_cluster,
    imported_run,
    missing_cluster,
    other_size,
)
from shardwise.stacks.read.summary import import_summary, imported_toml


@dataclass(frozen=True)
class ImportedFile:
    """A file of another stack, read as a run or as sections of one."""

    name: str
    imported: Imported
    # None if the model or the cluster is unknown.
    run: RunSpec | None
    # What must still be given to get a run: the model, the cluster, or both.
    lacks: tuple[Missing, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        """One sentence for each of model and cluster that must still be given to get a run."""
        return tuple(one.words(f"{one.part}=") for one in self.lacks)

    @property
    def toml(self) -> str:
        """The run.toml as text, headed by the summary as comments.

        Without a run, only the sections that the file determines.
        """
        return imported_toml(self.imported, self.name, self.run)

    @property
    def summary(self) -> list[str]:
        """One sentence per line: what was read, then what is not supported."""
        return import_summary(self.imported, self.name)

    def __repr__(self) -> str:
        counts = f"{len(self.imported.notes)} settings, {len(self.imported.unsupported)} lost"
        return f"ImportedFile({self.name!r}, {self.imported.what}: {counts})"


def import_(
    file: str | Path,
    model: str | Model | None = None,
    cluster: str | ClusterSpec | None = None,
) -> ImportedFile:
    """Read another stack's settings as a run. Scripts are read, never run.

    Args:
        file: A YAML of accelerate, TRL, axolotl or LLaMA-Factory, a DeepSpeed JSON,
            TrainingArguments or SFTConfig (JSON, YAML or script), a torchtitan configuration
            (Python or TOML), or a Python script with FSDP or DDP.
        model: As in `estimate`. Default: that of the file, if the file names one. Without it, or
            without a cluster, there is no run, only sections.
        cluster: As in `estimate`. Default: that of the file, if the file determines it (only one
            for CPUs with a number of processes does).

    Raises:
        SpecError: The file cannot be read, or what it says is invalid; lists every problem.

    Examples:
        >>> found = shardwise.import_("accelerate.yaml", "llama-3-8b", "8xH100-SXM")
        >>> found.run, found.imported.unsupported
    """
    path = Path(file)
    imported = import_file(path)
    where = cluster or imported_cluster(imported)
    lacks = [] if where else [missing_cluster(imported)]
    problems = Problems()
    chosen_model = chosen_cluster = run = None
    if model is None:
        chosen_model, unnamed = _named_model(imported, look_up=where is not None)
        lacks = [*unnamed, *lacks]
    else:
        with problems.collect():
            chosen_model = find_model(model) if isinstance(model, str) else model
    with problems.collect():
        chosen_cluster = find_cluster(where) if isinstance(where, str) else where
    problems.raise_if_any()
    if chosen_model is not None and chosen_cluster is not None:
        run = imported_run(imported, chosen_model, chosen_cluster)
    difference = other_size(imported, chosen_cluster) if chosen_cluster is not None else None
    if difference is not None:
        imported = imported._replace(outcomes=(*imported.outcomes, Outcome("lost", why=difference)))
    return ImportedFile(path.name, imported, run, tuple(lacks))


def _named_model(imported: Imported, look_up: bool) -> tuple[Model | None, list[Missing]]:
    """The model that a file names, and what is missing; with `look_up`, the name is looked up."""
    if imported.model is None:
        return None, [Missing("model", "the file does not name it", "gpt2")]
    if not look_up:
        return None, []
    try:
        return find_model(imported.model), []
    except SpecError as error:
        named = f"the file names {repr_text(imported.model)}"
        why = f"{named}, which cannot be read ({error.problems[0]})"
        return None, [Missing("model", why, "gpt2")]
