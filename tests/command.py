"""The command as a shell starts it, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMAND = (sys.executable, "-m", "shardwise")
# Only what never ends takes longer: a machine may be ten times slower than the one before.
PATIENCE_S = 900.0


def environment(**more: str) -> dict[str, str]:
    """Of a shell of 80 columns that is no rank of a run and finds the modules of tests."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    here = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return {**kept, "COLUMNS": "80", "NO_COLOR": "1", "PYTHONPATH": here, **more}


def shardwise(
    *words: str, folder: Path | None = None, timeout: float = PATIENCE_S, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in `folder`, with more variables in its environment; it may fail."""
    return subprocess.run(
        [*COMMAND, *words],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def refusal(*words: str) -> list[str]:
    """The sentences with which a command refuses its input, run in this process."""
    from typer.testing import CliRunner

    from shardwise.cli.main import add_commands, app
    from shardwise.spec.record import SpecError

    if not app.registered_commands:
        add_commands()
    done = CliRunner().invoke(app, list(words))
    assert isinstance(done.exception, SpecError), done.output
    assert done.stdout == ""
    return done.exception.problems
