"""The output of `shardwise import`: a run.toml under comments that say where it comes from."""

from __future__ import annotations

from shardwise.spec.run import RunSpec, write_run
from shardwise.stacks.read.imported import Imported


def imported_toml(imported: Imported, name: str, run: RunSpec | None) -> str:
    """The run as TOML, or the sections that the file settles, under its summary as comments."""
    comments = "".join(f"# {line}\n" for line in import_summary(imported, name))
    if run is not None:
        return f"{comments}\n{write_run(run)}"
    import tomli_w

    found = {
        "adapter": imported.adapter,
        "strategy": imported.strategy,
        "job": imported.job,
        "train": imported.train,
        "data": imported.data,
    }
    return f"{comments}\n{tomli_w.dumps({key: table for key, table in found.items() if table})}"


def import_summary(imported: Imported, name: str) -> list[str]:
    """Lines: the file, each setting that was read, then each setting that is not supported."""
    unsupported = [f"Not supported: {sentence}" for sentence in imported.unsupported]
    return [f"Read from {name}, {imported.what}.", *imported.notes, *unsupported]
