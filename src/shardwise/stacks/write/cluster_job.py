"""Parts of the jobs of all schedulers: names, folders and environment variables."""

from __future__ import annotations

import re
import shlex
from pathlib import PurePosixPath
from typing import NamedTuple

from shardwise.spec.record import Problems, SpecError
from shardwise.spec.run import RunSpec
from shardwise.stacks.write.exported import Target
from shardwise.stacks.write.quoting import slug

# Minutes, MM:SS, HH:MM:SS, or D-HH and its longer forms: times as Slurm reads them.
_TIME = re.compile(
    r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d{2}))?(?::(?P<third>\d{2}))?"
)
_UNLIMITED = ("UNLIMITED", "INFINITE")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Variable(NamedTuple):
    """An environment variable, and why it is set."""

    name: str
    value: str
    why: str


def check_target(run: RunSpec, target: Target) -> None:
    """Raise SpecError for a time, variables or spares that no scheduler can accept."""
    problems = Problems()
    with problems.collect():
        seconds_of(target.time)
    for name, value in target.environment.items():
        if not _VARIABLE.fullmatch(name):
            problems.found.append(f"--env: {name[:60]!r} is not a name; write NAME=VALUE")
        if not value.isprintable():
            problems.found.append(f"--env: the value of {name[:60]} must be one line of text")
    if target.spares and run.cluster.nodes == 1:
        problems.found.append(
            "--spares: a run on one node does not meet others; leave it out, or use more nodes"
        )
    if target.spares and not saves_checkpoints(run):
        problems.found.append("--spares: train.checkpoint is false, so no spare can take over")
    problems.raise_if_any()


def seconds_of(time: str | None) -> int | None:
    """Seconds of a time limit in Slurm's format (a plain number is minutes); None: unlimited."""
    if time is None or time.upper() in _UNLIMITED:
        return None
    match = _TIME.fullmatch(time)
    if match is None:
        raise SpecError(f"--time: cannot read {time[:60]!r}; write HH:MM:SS or D-HH:MM:SS")
    days, first, second, third = (
        int(match[part] or 0) for part in ("days", "first", "second", "third")
    )
    if match["days"] is not None or match["third"] is not None:
        return 86_400 * days + 3600 * first + 60 * second + third
    return 60 * first + second


def is_done_command(run: RunSpec, name: str) -> str:
    """A shell command that succeeds if the run `name` (a shell word) is done."""
    to = run.train.checkpoint.to if run.train is not None else None
    place = shlex.quote((to or str(runs_folder(run))).rstrip("/"))
    return f"shardwise runs {place}/{name} --where state=done >/dev/null 2>&1"


# A shell function that runs a launcher, forwards signals to it and returns its exit code.
LAUNCH = """\
launch() {
  "$@" &
  LAUNCHER=$!
  trap 'STOPPED=1; kill -TERM "$LAUNCHER"' TERM
  trap 'STOPPED=1; kill -USR1 "$LAUNCHER"' USR1
  # A signal ends `wait`, while the launcher still saves.
  while kill -0 "$LAUNCHER" 2>/dev/null; do wait "$LAUNCHER"; done
  wait "$LAUNCHER"
}
"""


def gpu_variables(run: RunSpec) -> tuple[Variable, ...]:
    """Environment variables of torch and NCCL; none on CPUs."""
    if run.cluster.device.is_cpu:
        return ()
    return (
        Variable("NCCL_DEBUG", "WARN", "NCCL prints warnings only."),
        Variable(
            "PYTORCH_ALLOC_CONF",
            "expandable_segments:True",
            "Less fragmentation: the allocator grows segments instead of adding new ones.",
        ),
    )


def job_name(run: RunSpec) -> str:
    """The name of the job, from the model and the kind, valid for every scheduler."""
    return slug(f"{run.model.name.rpartition('/')[2]}-{run.strategy.kind}")


def local_files(run: RunSpec) -> dict[str, str]:
    """Files of the local machine that the run needs, by the setting that names them."""
    data = run.data
    found: dict[str, str] = {}
    if config := getattr(run.model, "config", None):
        found["model.config"] = str(config)
    if data is not None and data.path:
        found["data.path"] = ", ".join(data.path)
    if data is not None and data.tokenizer != "bytes":
        found["data.tokenizer"] = data.tokenizer
    return found


def runs_folder(run: RunSpec) -> PurePosixPath:
    """The folder of the runs: `train.folder`, by default `runs`."""
    return PurePosixPath(run.train.folder if run.train else "runs")


def saves_checkpoints(run: RunSpec) -> bool:
    """Whether the run saves checkpoints; True by default."""
    return run.train is None or run.train.checkpoint.save


def saves_remotely(run: RunSpec) -> bool:
    """Whether checkpoints are saved to an object store."""
    return run.train is not None and "://" in (run.train.checkpoint.to or "")
