"""Start real worker processes through torchrun and collect what rank 0 reports."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.command import PATIENCE_S, environment


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launcher(processes: int) -> tuple[str, ...]:
    """What comes before a script, or before `--module` and a name, on ranks of one machine."""
    module = ("-m", "torch.distributed.run", "--standalone")
    return (sys.executable, *module, "--nproc-per-node", str(processes))


def output_of(
    command: Sequence[str], folder: Path, timeout: float = PATIENCE_S, **variables: str
) -> str:
    """What a command that must succeed printed."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def torchrun(
    processes: int, *words: str, folder: Path, timeout: float = PATIENCE_S, **variables: str
) -> str:
    """What ranks of one thread each printed."""
    command = [*launcher(processes), *words]
    return output_of(command, folder, timeout, OMP_NUM_THREADS="1", **variables)


def results(shown: str) -> list[dict[str, Any]]:
    """The lines that rank 0 marked; others may have written before a mark, on the same line."""
    lines = [line.partition("RESULT ")[2] for line in shown.splitlines() if "RESULT " in line]
    return [json.loads(line) for line in lines]
