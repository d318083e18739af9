"""A real run on hosts that are network namespaces: its launchers, its progress, its end."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.faults import plant
from benchmarks.lab.network import Host, hosts, kill_processes, processes_on, set_rate

ROOT = Path(__file__).resolve().parents[2]
PORT, RUN_ID = 29400, "hosts"
SECRET = secrets.token_hex(32)
# Longest wait for anything that must happen.
PATIENCE_S = 180.0
# Time that processes have to end after their launcher.
LEAVE_S = 10.0
STEP_S = 0.02
RUN = """
cluster = "{hosts}x{processes}xCPU"
model = {model}
job = {{ seq_len = 16, global_batch = {batch} }}
strategy = {{ {strategy}, micro_batch = 1, param_dtype = "fp32" }}

[train]
steps = {steps}
schedule = "constant"
learning_rate = 1e-3
log_every = 1
trackers = []
measure = false
checkpoint = {{ every = 10 }}
restart = {{ attempts = 100 }}
"""
_PLAIN = '"benchmarks.faults.plant:plain"'
_LLAMA = (
    '{ family = "llama", layers = 2, hidden = 32, heads = 4, kv_heads = 2, ffn = 48, vocab = 64, '
    "max_positions = 16, tied = true }"
)


class Setup(NamedTuple):
    """Processes of a host, the strategy on any number of hosts, and the model."""

    processes: int
    # Sequences of a step: divisible by the processes of 1, 2 and 3 hosts that read other data.
    sequences: int
    strategy: str
    model: str


STRATEGIES = {
    "zero3": Setup(1, 6, 'kind = "zero3"', _PLAIN),
    "hybrid": Setup(2, 12, 'kind = "zero3", shard = 2', _PLAIN),
    "tensor2": Setup(2, 6, 'kind = "zero3", tensor = 2', _LLAMA),
}


class Cluster:
    """One run, with a launcher on each host; `server` is the host with the rendezvous server."""

    def __init__(
        self, folder: Path, lab: Sequence[Host], server: Host, strategy: str, nodes: str, steps: int
    ) -> None:
        self.folder, self.hosts, self.server, self.nodes = folder, list(lab), server, nodes
        self.step_s = STEP_S
        setup = STRATEGIES[strategy]
        self.processes = setup.processes
        folder.mkdir(parents=True)
        most = int(nodes.rpartition(":")[2])
        run = RUN.format(
            hosts=most,
            processes=self.processes,
            batch=16 * setup.sequences,
            strategy=setup.strategy,
            model=setup.model,
            steps=steps,
        )
        (folder / "run.toml").write_text(run)
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}
        self.store: subprocess.Popen[bytes] | None = None

    # ---- processes ------------------------------------------------------------------------------

    def start(self, number: int) -> None:
        """Start the launcher of a host; its output is appended to a file."""
        words = ["train", "run.toml", "--name", "it", "--resume", "--nproc", str(self.processes)]
        self.launchers[number] = self._run(self.hosts[number], words, self._output(number))

    def serve(self) -> None:
        """Start the rendezvous server on a host that does not train."""
        words = ["rendezvous", f"{self.server.address}:{PORT}"]
        self.store = self._run(self.server, words, self.folder / "server.txt")

    def _run(self, host: Host, words: list[str], output: Path) -> subprocess.Popen[bytes]:
        variables = {
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "PET_NNODES": self.nodes,
            "PET_RDZV_ENDPOINT": f"{self.server.address}:{PORT}",
            "PET_RDZV_ID": RUN_ID,
            "SHARDWISE_RDZV_SECRET": SECRET,
            "NO_COLOR": "1",
            "OMP_NUM_THREADS": "1",
            plant.STEP_S: str(self.step_s),
        }
        with output.open("ab") as file:
            return subprocess.Popen(
                host.command(sys.executable, "-m", "shardwise", *words),
                cwd=self.folder,
                env={**os.environ, **variables},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def ranks(self, number: int) -> list[psutil.Process]:
        """The worker processes of a host."""
        with suppress(psutil.Error):
            children = psutil.Process(self.launchers[number].pid).children(recursive=True)
            return [child for child in children if child.name().startswith("rank ")]
        return []

    def kill(self, number: int) -> None:
        """Kill all processes of a host."""
        kill_processes([self.hosts[number]])
        self.launchers.pop(number).wait()

    def kill_server(self) -> None:
        assert self.store is not None
        self.store.kill()
        self.store.wait()

    # ---- links ----------------------------------------------------------------------------------

    def link(self, number: int, up: bool) -> None:
        """Plug in or pull out the cable of a host."""
        host = self.hosts[number]
        words = ("ip", "-n", host.switch, "link", "set", host.port, "up" if up else "down")
        subprocess.run(words, check=True, capture_output=True)

    def slow_link(self, number: int, rate_bits_per_s: float | None) -> None:
        set_rate([self.hosts[number]], rate_bits_per_s)

    # ---- progress -------------------------------------------------------------------------------

    def step(self) -> int:
        """The last completed step; 0 before the first."""
        lines = self.losses()
        return max(lines) if lines else 0

    def losses(self) -> dict[int, float]:
        try:
            text = (self.folder / "runs/it/metrics.jsonl").read_text()
            return {one["step"]: one["loss"] for one in map(json.loads, text.splitlines())}
        except (OSError, ValueError):
            return {}

    def wait_for_step(self, step: int) -> bool:
        return wait_until(lambda: self.step() >= step)

    def said(self, number: int) -> str:
        path = self._output(number)
        return path.read_text(errors="replace") if path.exists() else ""

    def _output(self, number: int) -> Path:
        return self.folder / f"host-{number}.txt"

    def recoveries(self) -> list[dict[str, Any]]:
        path = self.folder / "runs/it/recoveries.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    # ---- end ------------------------------------------------------------------------------------

    def ends(self) -> bool:
        """Wait for the launchers; return whether all of them succeeded."""
        done = wait_until(lambda: all(one.poll() is not None for one in self.launchers.values()))
        return done and all(one.returncode == 0 for one in self.launchers.values())

    def left_over(self) -> list[str]:
        """Processes that are still there seconds after all launchers ended, with their words."""
        store = [] if self.store is None else [self.store.pid]

        def found() -> list[int]:
            return [pid for pid in processes_on(self.hosts) if pid not in store]

        wait_until(lambda: not found(), LEAVE_S)
        words = []
        for pid in found():
            with suppress(psutil.Error):
                words.append(f"{pid} {' '.join(psutil.Process(pid).cmdline())}")
        return words

    def unexpected_ports(self) -> list[str]:
        """Addresses that a run should not listen on.

        Ranks listen for the collectives of torch, and one launcher for the store of an attempt, all
        of them on the address of their host. Only the rendezvous has a port of its own.
        """
        found, stores = [], []
        for host in {one.namespace: one for one in (*self.hosts, self.server)}.values():
            command = host.command("ss", "-Hltnp")
            listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            for line in listed.splitlines():
                address, _, port = line.split()[3].rpartition(":")
                is_rank = 'users:(("rank ' in line
                if address != host.address:
                    found.append(line)
                elif not is_rank and int(port) != PORT:
                    stores.append(line)
        return found + stores[1:]

    def state(self) -> dict[str, bytes]:
        """Every byte of the last checkpoint but its manifest, which has times."""
        [*_, last] = sorted((self.folder / "runs/it/checkpoints").glob("step-*"))
        return {one.name: one.read_bytes() for one in last.iterdir() if one.name != "manifest.json"}


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE_S) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@contextmanager
def cluster(
    folder: Path, count: int, strategy: str, nodes: str, steps: int, serves: bool
) -> Iterator[Cluster]:
    """Hosts with a run that is not started yet; the last host only serves if `serves`."""
    with hosts(count + serves, None, "hst") as lab:
        server = lab[-1] if serves else lab[0]
        made = Cluster(folder, lab, server, strategy, nodes, steps)
        if serves:
            made.serve()
        yield made
