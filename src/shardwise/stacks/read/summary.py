"""The output of `shardwise import`: a run.toml headed by comments that say where it comes from."""

from __future__ import annotations

from shardwise.spec.run import RunSpec, write_run
from shardwise.spec.toml_text import toml_text
from shardwise.stacks.read.imported import Imported
from shardwise.stacks.read.objective import is_unplanned, objective_warning


def imported_toml(imported: Imported, name: str, run: RunSpec | None) -> str:
    """The run as TOML text, headed by the summary as comments.

    Without a run, only the sections that the file determines. `name` is the file's name.
    """
    comments = import_summary(imported, name)
    if run is not None:
        return write_run(run, comments)
    found: dict[str, object] = {
        "model": imported.model,
        "adapter": imported.adapter,
        "strategy": imported.strategy,
        "job": imported.job,
        "train": imported.train,
        "data": imported.data,
    }
    return toml_text({key: table for key, table in found.items() if table}, comments)


def import_summary(imported: Imported, name: str) -> list[str]:
    """Lines: a warning for an unplanned objective, the file, what was read, what is lost."""
    warned = []
    if imported.objective is not None and is_unplanned(imported):
        warned = [f"Warning: {objective_warning(imported.objective)}."]
    unsupported = [f"Not supported: {sentence}" for sentence in imported.unsupported]
    return [*warned, f"Read from {name}, {imported.what}.", *imported.notes, *unsupported]
