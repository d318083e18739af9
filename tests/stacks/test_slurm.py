"""The script for Slurm, read by bash and shellcheck, and run with stand-ins of Slurm's commands.

`srun` and `scontrol` are replaced by two small programs that start real processes on this
machine; everything else, from the launchers to the checkpoints, is real.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardwise.launch.shared_secret import VARIABLE
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec, write_run
from shardwise.stacks.write.exported import DEFAULT_TARGET, Target
from shardwise.stacks.write.slurm import export
from tests.command import PATIENCE_S, ROOT
from tests.stacks.runs import HOSTILE, HOSTILE_NAME, large, tiny

RUNS = {
    "one node of CPUs": tiny(),
    "two nodes of CPUs": tiny(cluster="2x1xCPU"),
    "two nodes of GPUs": large(),
    "saves nothing": tiny(cluster="2x1xCPU", train={"checkpoint": False}),
    "hostile": tiny(model={"name": HOSTILE_NAME}, train={"folder": HOSTILE}),
}

# Starts a task on each "node", tells it what Slurm would, and exits with the highest code.
SRUN = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    words.pop(0)
nodes = int(os.environ["SLURM_NNODES"])
tasks = [
    subprocess.Popen(words, env={{**os.environ, "SLURM_NTASKS": str(nodes),
        "SLURM_PROCID": str(node), "SLURM_NODEID": str(node), "SLURM_LOCALID": "0"}})
    for node in range(nodes)
]
open("tasks", "w").write(" ".join(str(task.pid) for task in tasks))
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SCONTROL = """#!{python}
import os, sys
if sys.argv[1:3] == ["show", "hostnames"]:
    print("\\n".join(["localhost"] * int(os.environ["SLURM_NNODES"])))
else:
    open("requeued", "a").write(" ".join(sys.argv[1:]) + "\\n")
"""


# More than devices: what a script may be asked for.
ASKED = Target(
    environment={"NCCL_SOCKET_IFNAME": "ib0", "HOSTILE": HOSTILE_NAME},
    setup=("module load cuda", "source .venv/bin/activate"),
    spares=1,
)


def script(run: RunSpec, folder: Path, target: Target = DEFAULT_TARGET) -> Path:
    path = folder / "run.sbatch"
    path.write_text(export(run, target).text)
    return path


CASES = {name: (run, DEFAULT_TARGET) for name, run in RUNS.items()}
CASES["spares"] = (RUNS["two nodes of GPUs"], ASKED)


@pytest.mark.parametrize(("run", "target"), CASES.values(), ids=CASES)
def test_bash_and_shellcheck_find_nothing(run: RunSpec, target: Target, tmp_path: Path) -> None:
    # shellcheck would ask whether text that looks like a command is one.
    target = target._replace(setup=target.setup[:1], environment={"NAME": "a b"})
    path = script(run, tmp_path, target)
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def directives(run: RunSpec, target: Target = DEFAULT_TARGET) -> dict[str, str]:
    lines = [line for line in export(run, target).text.splitlines() if line.startswith("#SBATCH ")]
    pairs = (line.removeprefix("#SBATCH --").partition("=") for line in lines)
    return {key: value for key, _, value in pairs}


def test_what_is_asked_of_slurm() -> None:
    asked = directives(large())
    assert asked["nodes"] == "2"
    assert asked["gpus-per-node"] == "8"
    assert asked["ntasks-per-node"] == "1"
    assert {"requeue", "exclusive"} <= set(asked)
    assert asked["signal"].startswith("USR1@")
    assert "gpus-per-node" not in directives(tiny())
    assert any("cluster.network" in loss for loss in export(large()).unsupported)


def test_spares_are_nodes_that_do_not_train() -> None:
    asked = directives(large(), ASKED)
    assert (asked["nodes"], "no-kill" in asked) == ("3", True)
    assert "export PET_NNODES=2\n" in export(large(), ASKED).text
    assert "no-kill" not in directives(large())


def test_the_environment_is_what_was_asked_for(tmp_path: Path) -> None:
    """What bash makes of the lines that set it, whatever the values say."""
    text = export(large(), ASKED).text
    begin = text.index("export NCCL_SOCKET_IFNAME")
    lines = text[begin : text.index("# Processes of one node")]
    shown = subprocess.run(
        ["bash", "-uc", f"{lines}\nenv -0"], cwd=tmp_path, capture_output=True, check=True
    )
    found = dict(one.split(b"=", 1) for one in shown.stdout.split(b"\0") if one)
    for name, value in ASKED.environment.items():
        assert found[name.encode()].decode() == value
    assert not list(tmp_path.iterdir())
    assert text.index("module load cuda\nsource .venv/bin/activate\n") < begin


@pytest.mark.parametrize(
    ("run", "target", "location"),
    [
        (large(), Target(time="soon"), "--time"),
        (large(), Target(environment={"A B": "1"}), "--env"),
        (large(), Target(environment={"A": HOSTILE}), "--env"),
        (large(), Target(setup=("one\ntwo",)), "--setup"),
        (tiny(), Target(spares=1), "--spares"),
        (RUNS["saves nothing"], Target(spares=1), "--spares"),
    ],
)
def test_what_cannot_be_asked_for(run: RunSpec, target: Target, location: str) -> None:
    with pytest.raises(SpecError, match=location):
        export(run, target)


def test_a_run_that_saves_nothing_is_not_queued_again() -> None:
    run = RUNS["saves nothing"]
    assert not {"requeue", "signal"} & set(directives(run))
    assert "--resume" not in export(run).text
    assert any("train.checkpoint" in loss for loss in export(run).unsupported)


def test_directives_do_not_come_from_names() -> None:
    assert directives(RUNS["hostile"])["nodes"] == "1"


def test_the_nodes_share_a_secret_that_is_made_in_the_job(tmp_path: Path) -> None:
    """New in each start; not in the script, and in no command that others see in a list."""
    text = export(large()).text
    begin = text.index(f"{VARIABLE}=")
    lines = text[begin : text.index("\n\n", begin)]
    command = ["bash", "-euc", f"set -o pipefail\n{lines}\nbash -c 'echo ${VARIABLE}'"]
    found = [
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        for _ in range(2)
    ]
    assert found[0] != found[1]
    for secret in found:
        assert len(bytes.fromhex(secret)) == 32
    assert VARIABLE not in "".join(text[text.index("\nsrun ") :])
    assert VARIABLE not in export(tiny()).text


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """A place with stand-ins of Slurm's two commands, and what Slurm tells a job of two nodes."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text.format(python=sys.executable))
        (tools / name).chmod(0o755)
    programs = Path(sys.executable).parent
    return {
        **os.environ,
        "PATH": f"{tools}:{programs}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "SLURM_JOB_ID": str(random.randrange(1000, 20_000)),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_CPUS_ON_NODE": "1",
    }


def started(
    run: RunSpec, folder: Path, slurm: dict[str, str], target: Target = DEFAULT_TARGET
) -> subprocess.Popen[str]:
    (folder / "run.toml").write_text(write_run(run))
    return subprocess.Popen(
        ["bash", str(script(run, folder, target))], cwd=folder, env=slurm, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def steps_in(folder: Path) -> list[int]:
    files = list(folder.glob("runs/*/metrics.jsonl"))
    assert len(files) < 2
    return [json.loads(line)["step"] for file in files for line in file.read_text().splitlines()]


@pytest.mark.nightly
def test_two_nodes_train_stop_before_the_time_is_up_and_go_on(
    tmp_path: Path, slurm: dict[str, str]
) -> None:
    pytest.importorskip("transformers")
    run = tiny(cluster="2x1xCPU", train={"steps": 300})
    job = started(run, tmp_path, slurm)
    deadline = time.monotonic() + PATIENCE_S
    while len(steps_in(tmp_path)) < 3 and job.poll() is None:
        assert time.monotonic() < deadline, "it did not begin"
        time.sleep(0.05)
    for task in (tmp_path / "tasks").read_text().split():
        os.kill(int(task), signal.SIGUSR1)
    said = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 138, said
    assert (tmp_path / "requeued").read_text() == f"requeue {slurm['SLURM_JOB_ID']}\n"
    stopped = len(steps_in(tmp_path))
    assert stopped < 300

    again = started(run, tmp_path, slurm)
    said = again.communicate(timeout=PATIENCE_S)
    assert again.returncode == 0, said
    assert steps_in(tmp_path) == list(range(1, 301))
    [folder] = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "prediction.json").read_text())["cluster"]["devices"] == 2


def trees(folder: Path) -> list[list[Any]]:
    """The processes of each task: the shell, the launcher, and what it started."""
    psutil = pytest.importorskip("psutil")
    tasks = [psutil.Process(int(pid)) for pid in (folder / "tasks").read_text().split()]
    return [[task, *task.children(recursive=True)] for task in tasks]


@pytest.mark.nightly
def test_a_spare_takes_the_place_of_a_node_that_is_lost(
    tmp_path: Path, slurm: dict[str, str]
) -> None:
    pytest.importorskip("transformers")
    run = tiny(cluster="2x1xCPU", train={"steps": 800, "checkpoint": {"every": 20}})
    job = started(run, tmp_path, {**slurm, "SLURM_NNODES": "3"}, Target(spares=1))
    deadline = time.monotonic() + PATIENCE_S
    while len(steps_in(tmp_path)) < 60:
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline, "it did not begin"
        time.sleep(0.05)
    training = [
        tree for tree in trees(tmp_path) if any(one.name().startswith("rank ") for one in tree)
    ]
    assert len(training) == 2
    port = 20_000 + int(slurm["SLURM_JOB_ID"]) % 20_000
    # The first node serves the rendezvous: it must come back itself.
    lost = next(
        tree for tree in training
        if not any(c.status == "LISTEN" and c.laddr.port == port
                   for one in tree for c in one.net_connections())
    )  # fmt: skip
    for process in lost:
        process.kill()
    said = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 0, said
    assert steps_in(tmp_path) == list(range(1, 801))
    [folder] = (tmp_path / "runs").iterdir()
    assert len((folder / "recoveries.jsonl").read_text().splitlines()) >= 1


@pytest.mark.nightly
def test_names_do_nothing(tmp_path: Path, slurm: dict[str, str]) -> None:
    """Folder and model are called as if they were commands; one process on one node."""
    pytest.importorskip("transformers")
    name = "x'\"; $(touch pwned) `touch pwned`"
    run = tiny(
        cluster="1x1xCPU",
        model={"name": HOSTILE_NAME},
        strategy={"kind": "single"},
        train={"folder": name, "steps": 2},
    )
    job = started(run, tmp_path, {**slurm, "SLURM_NNODES": "1"})
    said = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 0, said
    assert not list(tmp_path.rglob("*pwned*")) or [p.name for p in tmp_path.glob("*pwned*")] == [
        name
    ]
    assert not (tmp_path / "pwned").exists()
