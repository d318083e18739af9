"""What `shardwise import` writes: a run.toml that says where its settings come from."""

from __future__ import annotations

from shardwise.spec.run import RunSpec, write_run
from shardwise.stacks.read.imported import Imported


def imported_toml(imported: Imported, name: str, run: RunSpec | None) -> str:
    """The run, or what is known of it, under comments that tell what was understood and lost."""
    comments = "".join(f"# {line}\n" for line in told(imported, name))
    if run is not None:
        return f"{comments}\n{write_run(run)}"
    import tomli_w

    found = {"strategy": imported.strategy, "job": imported.job, "train": imported.train}
    return f"{comments}\n{tomli_w.dumps({key: table for key, table in found.items() if table})}"


def told(imported: Imported, name: str) -> list[str]:
    """What was understood, then what was not, line by line."""
    lost = [f"Not carried over: {loss}" for loss in imported.losses]
    return [f"From {name}, {imported.what}.", *imported.notes, *lost]
