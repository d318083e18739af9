"""Write a run as a Slurm batch script: one launcher per node starts and watches its processes."""

from __future__ import annotations

import re
import shlex

from shardwise.spec.foreign_text import one_line
from shardwise.spec.record import Problems
from shardwise.spec.run import RunSpec
from shardwise.spec.train import SECRET_VARIABLE
from shardwise.stacks.outcomes import ABSENT, Difference, Differences
from shardwise.stacks.write.cluster_job import (
    LAUNCH,
    check_target,
    gpu_variables,
    is_done_command,
    job_name,
    runs_folder,
    saves_checkpoints,
    saves_remotely,
)
from shardwise.stacks.write.exported import DEFAULT_TARGET, Exported, Target

NAME = "run.sbatch"
DEFAULT_TIME = "24:00:00"
# Seconds before the time limit when the job gets a signal; a step and a save must fit into them.
WARNING_S = 300
# How often a launcher that loses the others is started; each time, train.restart.attempts apply.
ATTEMPTS = 3
# A name that Slurm accepts.
_NAME = re.compile(r"[A-Za-z0-9_.,@+-]{1,128}")


def export(run: RunSpec, target: Target = DEFAULT_TARGET) -> Exported:
    """The batch script; it trains its first argument, or by default the run.toml of this run."""
    _check(run, target)
    many = run.cluster.nodes > 1
    parts = [_header(run, target), _environment(run, target)]
    if many:
        parts += [_rendezvous_lines(run), _keep_launching(run, target)]
    parts.append(_start(run, target))
    if many and saves_checkpoints(run):
        parts.append(_DONE.format(is_done=is_done_command(run, '"$NAME"')))
    if saves_checkpoints(run):
        parts.append(_AGAIN)
    command = f"sbatch {target.name(NAME)}"
    return Exported(
        NAME, "\n".join(parts) + _EXIT, _differences(run, target), command, run.strategy
    )


def _check(run: RunSpec, target: Target) -> None:
    """Raise SpecError for options that Slurm cannot accept."""
    problems = Problems()
    with problems.collect():
        check_target(run, target)
    for option, value in (("partition", target.partition), ("account", target.account)):
        if value is not None and not _NAME.fullmatch(value):
            problems.found.append(f"--{option}: {value[:60]!r} is not a name that Slurm takes")
    for line in target.setup:
        if not line.isprintable():
            problems.found.append(f"--setup: {line[:60]!r} is not one line; give the option twice")
    problems.raise_if_any()


def _header(run: RunSpec, target: Target) -> str:
    """The head of the script: the `#SBATCH` options and the name of the run."""
    cluster = run.cluster
    gpus = f"#SBATCH --gpus-per-node={cluster.devices_per_node}\n"
    again = _REQUEUE if saves_checkpoints(run) else ""
    spares = _SPARES.format(nodes=cluster.nodes) if target.spares else ""
    asked = "".join(
        f"#SBATCH --{option}={value}\n"
        for option, value in (("partition", target.partition), ("account", target.account))
        if value is not None
    )
    return f"""\
#!/bin/bash
# {one_line(f"{run.model.name} on {cluster}: {run.strategy}")}
#SBATCH --job-name={job_name(run)}
{spares}\
#SBATCH --nodes={cluster.nodes + target.spares}
#SBATCH --ntasks-per-node=1
{"" if cluster.device.is_cpu else gpus}\
#SBATCH --exclusive
{asked}\
#SBATCH --time={target.time or DEFAULT_TIME}
{again}\
#SBATCH --output={job_name(run)}-%j.log

set -uo pipefail

RUN=${{1:-{shlex.quote(target.run_file)}}}
# Slurm keeps the job ID when it requeues the job, so the run finds its checkpoints.
NAME={job_name(run)}-$SLURM_JOB_ID
"""


_SPARES = """\
# {nodes} nodes train, the others are spares: if one is lost, a spare takes its place.
# --no-kill: the job goes on without a node that failed.
#SBATCH --no-kill
"""
_REQUEUE = f"""\
# Slurm requeues the job after a node failure or preemption, with the same job ID.
#SBATCH --requeue
#SBATCH --open-mode=append
# Before the time limit the launchers get SIGUSR1: they finish the step, save, and exit with 138.
# One step and one save must fit into these seconds.
#SBATCH --signal=USR1@{WARNING_S}
"""


def _environment(run: RunSpec, target: Target) -> str:
    """The lines that run setup commands and export environment variables."""
    processes = run.cluster.devices_per_node
    lines = [
        *target.setup,
        *(f"export {name}={shlex.quote(value)}" for name, value in target.environment.items()),
        "# Processes of one node share its cores.",
        f"THREADS=$((SLURM_CPUS_ON_NODE / {processes}))",
        "export OMP_NUM_THREADS=$((THREADS > 0 ? THREADS : 1))",
    ]
    for variable in gpu_variables(run):
        lines += [f"# {variable.why}", f"export {variable.name}={variable.value}"]
    if not run.cluster.device.is_cpu:
        lines += [
            "# If nodes have several networks, name the one that connects them:",
            "# export NCCL_SOCKET_IFNAME=ib0",
            "# TORCH_NCCL_ASYNC_ERROR_HANDLING keeps torch's default: a process whose collective",
            "# fails exits, and its launcher restarts all processes.",
        ]
    return "\n".join(lines) + "\n"


def _rendezvous_lines(run: RunSpec) -> str:
    """The lines that configure the rendezvous of several nodes."""
    return f"""\
# Rendezvous on the first node, at a port that other jobs on that node do not use.
FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export PET_NNODES={run.cluster.nodes}
export PET_RDZV_ENDPOINT=$FIRST:$((20000 + SLURM_JOB_ID % 20000))
export PET_RDZV_ID=$SLURM_JOB_ID
export NAME FIRST
# The nodes prove to each other that they know it. srun passes it on; it is written nowhere, and new
# in each start of the job.
{SECRET_VARIABLE}=$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n')
export {SECRET_VARIABLE}
"""


# Only one node asks, once a minute, to spare Slurm's controller.
_REQUEUE_WITHOUT_FIRST = """\
# With --no-kill, Slurm keeps even a job that lost its first node, where this script and the
# rendezvous run. The second node then requeues it.
# shellcheck disable=SC2317
requeue_without_first() {
  local nodes
  while sleep 60; do
    nodes=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N)
    if [ -n "$nodes" ] && ! scontrol show hostnames "$nodes" | grep -qxF "$FIRST"; then
      scontrol requeue "$SLURM_JOB_ID"
    fi
  done
}
"""
_WATCH_FIRST = """\
  if [ "$SLURM_NODEID" = 1 ]; then
    requeue_without_first >/dev/null 2>&1 &
    WATCH=$!
    trap 'kill "$WATCH" 2>/dev/null' EXIT
  fi
"""


def _keep_launching(run: RunSpec, target: Target) -> str:
    """The shell functions that start a launcher again if it loses the others."""
    watched = f"{_REQUEUE_WITHOUT_FIRST}\n" if target.spares else ""
    return f"""\
# shellcheck disable=SC2317  # srun calls these functions, on every node
{LAUNCH}
{watched}\
# Exit code 1: the launcher lost the others, or gave up. It starts again: a node that was lost may
# have been replaced. A spare that was not needed is done when the run is.
# shellcheck disable=SC2317
keep_launching() {{
  local code STOPPED=0
{_WATCH_FIRST if target.spares else ""}\
  for _ in {" ".join(map(str, range(1, ATTEMPTS + 1)))}; do
    launch "$@"
    code=$?
    if [ "$code" -ne 1 ] || [ "$STOPPED" = 1 ]; then return "$code"; fi
    if {is_done_command(run, '"$NAME"')}; then return 0; fi
    sleep 5
    if [ "$STOPPED" = 1 ]; then return 143; fi
  done
  return "$code"
}}
"""


def _start(run: RunSpec, target: Target) -> str:
    """The lines that start one launcher per node with srun."""
    name = '--name "$NAME"' + (" --resume" if saves_checkpoints(run) else "")
    many = run.cluster.nodes > 1
    watch = " requeue_without_first" if target.spares else ""
    functions = f"export -f launch keep_launching{watch}\n" if many else ""
    launcher = "bash -c 'keep_launching \"$@\"' launcher \\\n  " if many else ""
    kept = " --no-kill" if target.spares else ""
    return f"""\
{functions}\
# --cpu-bind=none: a launcher's processes use all cores of the node, not those of one task.
# --kill-on-bad-exit=0, --wait=0: a launcher that has saved does not end those still saving.
# --ntasks: one per node that the job has, also if it lost one before it was requeued.
srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpu-bind=none \\
  --kill-on-bad-exit=0 --wait=0{kept} \\
  {launcher}shardwise train "$RUN" --nproc {run.cluster.devices_per_node} {name}
CODE=$?
"""


_DONE = """\
# A node that was lost leaves its exit code behind; whether the run is done decides.
if [ "$CODE" -ne 0 ] && {is_done}; then
  CODE=0
fi
"""
_AGAIN = """\
# Saved before the time limit: requeue. scancel and preemption send SIGTERM (143).
if [ "$CODE" -eq 138 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
"""
_EXIT = 'exit "$CODE"\n'


def _differences(run: RunSpec, target: Target) -> tuple[Difference, ...]:
    """What the script cannot express or leaves to the user."""
    differences = Differences()
    if run.cluster.network is not None and target.partition is None:
        differences.add(
            "Slurm allocates nodes, not bandwidth; name a partition that has it with --partition",
            {"cluster.network": ABSENT},
        )
    if not saves_checkpoints(run):
        differences.add(
            "the job is not requeued after its time limit or a failure",
            {"train.checkpoint": False},
        )
    elif run.cluster.nodes > 1 and not saves_remotely(run):
        differences.add(
            "it must be one folder that all nodes see; submit the job from a shared file system, "
            "or set train.checkpoint.to",
            {"train.folder": str(runs_folder(run))},
        )
    return tuple(differences)
