"""Ask `shardwise serve` with many clients at a time.

`python -m benchmarks.planner.load [--clients 50] [--seconds 60] [--json]` starts a server on the
loopback. A tenth of the questions are plans, the others estimates, as from sliders.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from http.client import HTTPConnection, HTTPException
from statistics import median, quantiles
from typing import Any

PLAN_SHARE = 0.1
MODELS = ("llama-3-8b", "llama-2-7b", "qwen2.5-7b")
CLUSTERS = ("8xH100-SXM", "4x8xH100-SXM@400Gbps", "2x8xA100-80GB@200Gbps")


def start() -> tuple[subprocess.Popen[str], int, str]:
    """A server, its port and its token."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["-u", "-m", "shardwise", "serve", "--port", str(port)]
    server = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    token = server.stdout.readline().strip().partition("token=")[2]
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return server, port, token
        except OSError:
            time.sleep(0.1)


class Client(threading.Thread):
    """Asks one question after the other until the time is over."""

    def __init__(self, number: int, port: int, token: str, end: float) -> None:
        super().__init__(daemon=True)
        self.rng, self.port, self.token, self.end = random.Random(number), port, token, end
        self.took: list[tuple[str, float]] = []
        self.errors: Counter[str] = Counter()

    def run(self) -> None:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        while time.monotonic() < self.end:
            ask = "plan" if self.rng.random() < PLAN_SHARE else "estimate"
            question = {"ask": ask, "model": self.rng.choice(MODELS)}
            question["cluster"] = self.rng.choice(CLUSTERS)
            begin = time.monotonic()
            try:
                connection.request("POST", "/api/answer", json.dumps(question), {
                    "Authorization": f"Bearer {self.token}", "Content-Type": "application/json",
                })  # fmt: skip
                answer = connection.getresponse()
                found = json.loads(answer.read())
                if answer.status != 200 or found["problems"]:
                    self.errors[f"{answer.status}: {found['problems'][:1]}"] += 1
            except (OSError, HTTPException, ValueError) as error:
                self.errors[type(error).__name__] += 1
                connection.close()
            self.took.append((ask, time.monotonic() - begin))
        connection.close()


def measure(clients: int, seconds: float) -> dict[str, Any]:
    server, port, token = start()
    try:
        end = time.monotonic() + seconds
        asking = [Client(number, port, token, end) for number in range(clients)]
        for client in asking:
            client.start()
        for client in asking:
            client.join()
    finally:
        server.terminate()
        server.wait(30)
    errors = sum((client.errors for client in asking), Counter())
    told: dict[str, Any] = {"clients": clients, "seconds": seconds, "errors": dict(errors)}
    for kind in ("plan", "estimate"):
        took = [length for client in asking for ask, length in client.took if ask == kind]
        told[kind] = {
            "answers": len(took),
            "median_s": median(took),
            "p99_s": quantiles(took, n=100)[-1],
        }
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    told = measure(given.clients, given.seconds)
    sys.stdout.write(json.dumps(told, indent=2 if given.json else None) + "\n")


if __name__ == "__main__":
    main()
