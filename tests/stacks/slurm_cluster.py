"""A real Slurm on this machine: its controller and its nodes are hosts of a lab.

Each node has a network, a host name and a slurmd of its own, so that a node can be lost.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.lab.network import Host, available, hosts, kill_processes, processes_on
from tests.command import PATIENCE_S, environment

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
CONTROL = "control"
# No limits by cgroups: a lab does not see them. A node is lost after 10 seconds of silence.
CONFIG = """\
ClusterName=lab
SlurmctldHost={control}({address})
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/linear
ReturnToService=2
SlurmdTimeout=10
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# A program on a host of the lab, which has a name and knows the names of the others.
ON_HOST = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'


def missing() -> str | None:
    """Why there can be no Slurm here; None if there can."""
    if not all(map(shutil.which, PROGRAMS)):
        return "needs Slurm: apt-get install slurm-wlm munge"
    return available()


class Slurm:
    """A cluster with the nodes n1, n2, …; `folder` has its state and its logs."""

    def __init__(self, folder: Path, lab: list[Host]) -> None:
        self.folder = folder
        self.nodes = {f"n{number}": host for number, host in enumerate(lab[1:], 1)}
        self._hosts = {CONTROL: lab[0], **self.nodes}
        self._services: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        self._configure()
        own = [f"--{one}-file={self.folder}/munge.{one}" for one in ("key", "pid", "log", "seed")]
        # --force: only root, which is all that runs here, may enter the folder of a test.
        serve = ("munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket")
        self._serve([*serve, *own])
        wait_until((self.folder / "munge.socket").exists)
        self._serve(self._on(CONTROL, "slurmctld", "-D"))
        for name in self.nodes:
            self.start(name)
        wait_until(
            lambda: self.output("sinfo", "-ho", "%t %D").strip() == f"idle {len(self.nodes)}"
        )
        return self

    def __exit__(self, *_: object) -> None:
        kill_processes(list(self._hosts.values()))
        for service in self._services:
            service.terminate()
            service.wait()

    def _configure(self) -> None:
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        nodes = [f"NodeName={node} NodeAddr={one.address}" for node, one in self.nodes.items()]
        files = {
            "slurm.conf": CONFIG.format(
                control=CONTROL,
                address=self._hosts[CONTROL].address,
                folder=self.folder,
                nodes="\n".join(f"{node} CPUs=4 RealMemory=1000" for node in nodes),
            ),
            # The version that a node need not have.
            "cgroup.conf": "CgroupPlugin=cgroup/v1\n",
            "hosts": "127.0.0.1 localhost\n"
            + "".join(f"{one.address} {name}\n" for name, one in self._hosts.items()),
        }
        for name, text in files.items():
            (self.folder / name).write_text(text)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)

    def start(self, node: str) -> None:
        """Start a node's daemon; also that of a node that was lost."""
        self._link(node, "up")
        self._serve(self._on(node, "slurmd", "-D"))

    def lose(self, node: str) -> None:
        """Take a node's power: nothing on it says goodbye, as a process that is killed might."""
        self._link(node, "down")
        kill_processes([self.nodes[node]])

    def _link(self, node: str, state: str) -> None:
        host = self.nodes[node]
        words = ("ip", "-n", host.switch, "link", "set", host.port, state)
        subprocess.run(words, check=True, capture_output=True)

    def processes(self, node: str) -> list[int]:
        return processes_on([self.nodes[node]])

    def output(self, *words: str, cwd: Path | None = None) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(
            self._on(CONTROL, *words), cwd=cwd, env=self._environment(), capture_output=True,
            text=True, timeout=60, check=False,
        )  # fmt: skip
        return done.stdout

    def submit(self, script: Path) -> str:
        """Submit a script from its folder; returns the job ID."""
        return self.output("sbatch", "--parsable", str(script), cwd=script.parent).strip()

    def state(self, job: str) -> str:
        """The state of a job, such as RUNNING or COMPLETED."""
        words = self.output("scontrol", "show", "job", job).split()
        return next((word[9:] for word in words if word.startswith("JobState=")), "")

    def _on(self, name: str, *words: str) -> list[str]:
        inside = ("unshare", "--uts", "--mount", "bash", "-c", ON_HOST, "bash")
        return self._hosts[name].command(*inside, name, str(self.folder / "hosts"), *words)

    def _serve(self, command: list[str]) -> None:
        service = subprocess.Popen(
            command,
            env=self._environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._services.append(service)

    def _environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return environment(SLURM_CONF=str(self.folder / "slurm.conf"), PATH=path)


@contextmanager
def slurm(folder: Path, nodes: int) -> Iterator[Slurm]:
    with hosts(1 + nodes, None, "slurm") as lab, Slurm(folder, lab) as cluster:
        yield cluster


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.5)
