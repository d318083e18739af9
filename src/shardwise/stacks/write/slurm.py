"""Write a run as a Slurm batch script: one launcher per node starts and watches its processes."""

from __future__ import annotations

import re
import shlex

from shardwise.spec.record import Problems
from shardwise.spec.run import RunSpec
from shardwise.stacks.write.cluster_job import (
    gpu_variables,
    job_name,
    runs_folder,
    saves,
    saves_far_away,
)
from shardwise.stacks.write.exported import USUAL, Exported, Target
from shardwise.stacks.write.quoting import comment

NAME = "run.sbatch"
DEFAULT_TIME = "24:00:00"
# Seconds before the time limit at which the job is signalled: one step and one save must fit.
WARNING_S = 300


# What Slurm takes as a name, and as a time: minutes, HH:MM:SS, or D-HH:MM:SS and its short forms.
_NAME = re.compile(r"[A-Za-z0-9_.,@+-]{1,128}")
_TIME = re.compile(
    r"\d+|\d+:\d{2}(:\d{2})?|\d+-\d{1,2}(:\d{2}){0,2}|UNLIMITED|INFINITE", re.IGNORECASE
)


def export(run: RunSpec, target: Target = USUAL) -> Exported:
    """The script; it starts the run.toml it was written from, or the one that is its argument."""
    _check(target)
    parts = [_request(run, target), _environment(run)]
    if run.cluster.nodes > 1:
        parts.append(_MEET)
    parts.append(_start(run))
    if saves(run):
        parts.append(_AGAIN)
    command = f"sbatch {target.name(NAME)}"
    return Exported(
        NAME, "\n".join(parts) + _EXIT, _unsupported(run, target), command, run.strategy
    )


def _check(target: Target) -> None:
    problems = Problems()
    for option, value in (("partition", target.partition), ("account", target.account)):
        if value is not None and not _NAME.fullmatch(value):
            problems.found.append(f"--{option}: {value[:60]!r} is not a name that Slurm takes")
    if target.time is not None and not _TIME.fullmatch(target.time):
        problems.found.append(
            f"--time: cannot read {target.time[:60]!r}; write HH:MM:SS or D-HH:MM:SS"
        )
    problems.raise_if_any()


def _request(run: RunSpec, target: Target) -> str:
    cluster = run.cluster
    gpus = f"#SBATCH --gpus-per-node={cluster.devices_per_node}\n"
    again = _REQUEUE if saves(run) else ""
    asked = "".join(
        f"#SBATCH --{option}={value}\n"
        for option, value in (("partition", target.partition), ("account", target.account))
        if value is not None
    )
    return f"""\
#!/bin/bash
# {comment(run.model.name)} on {comment(str(cluster))}: {comment(str(run.strategy))}
#SBATCH --job-name={job_name(run)}
#SBATCH --nodes={cluster.nodes}
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


_REQUEUE = f"""\
# Slurm requeues the job after a node failure or preemption, with the same job ID.
#SBATCH --requeue
#SBATCH --open-mode=append
# Before the time limit the launchers get SIGUSR1: they finish the step, save, and exit with 138.
# One step and one save must fit into these seconds.
#SBATCH --signal=USR1@{WARNING_S}
"""


def _environment(run: RunSpec) -> str:
    processes = run.cluster.devices_per_node
    lines = [
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


_MEET = """\
# Rendezvous on the first node, at a port that other jobs on that node do not use.
FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export PET_NNODES=$SLURM_NNODES
export PET_RDZV_ENDPOINT=$FIRST:$((20000 + SLURM_JOB_ID % 20000))
export PET_RDZV_ID=$SLURM_JOB_ID
"""


def _start(run: RunSpec) -> str:
    name = '--name "$NAME"' + (" --resume" if saves(run) else "")
    return f"""\
# --cpu-bind=none: a launcher's processes use all cores of the node, not those of one task.
# --kill-on-bad-exit=0, --wait=0: a launcher that has saved does not end those still saving.
srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --wait=0 \\
  shardwise train "$RUN" --nproc {run.cluster.devices_per_node} {name}
CODE=$?
"""


_AGAIN = """\
# Saved before the time limit: requeue. scancel and preemption send SIGTERM (143).
if [ "$CODE" -eq 138 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
"""
_EXIT = 'exit "$CODE"\n'


def _unsupported(run: RunSpec, target: Target) -> tuple[str, ...]:
    found = []
    if run.cluster.network is not None and target.partition is None:
        found.append(
            "cluster.network: Slurm allocates nodes, not bandwidth; name a partition that has it "
            "with --partition."
        )
    if not saves(run):
        found.append(
            "train.checkpoint = false: the job is not requeued after its time limit or a failure."
        )
    elif run.cluster.nodes > 1 and not saves_far_away(run):
        found.append(
            f"train.folder = {str(runs_folder(run))!r}: it must be one folder that all nodes see; "
            "submit the job from a shared file system, or set train.checkpoint.to."
        )
    return tuple(found)
