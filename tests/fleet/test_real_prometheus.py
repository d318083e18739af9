"""A real Prometheus scrapes a real training; dashboard and alerts are asked of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command import PATIENCE_S
from tests.distributed.launch import free_port
from tests.fleet.files import ALERTS, FOLDER, alert_queries, panel_queries
from tests.fleet.running import Running, training

PROMETHEUS = shutil.which("prometheus")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(PROMETHEUS is None, reason="needs apt-get install prometheus"),
]
# Not known of a run on this machine's CPU: its peak, the time of a step; and no step is profiled.
ABSENT = ("shardwise_mfu_ratio", "shardwise_predicted_step_seconds", "shardwise_profile_")


class Prometheus:
    """The server's HTTP interface."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def get(self, path: str, **words: str) -> Any:
        query = urllib.parse.urlencode(words)
        with urllib.request.urlopen(f"{self._url}/{path}?{query}", timeout=30) as answer:
            data = json.load(answer)
        assert data["status"] == "success", data
        return data["data"]

    def values(self, query: str) -> list[float]:
        result = self.get("query", query=query)["result"]
        assert all(one["metric"].get("run", "it") == "it" for one in result)
        return [float(one["value"][1]) for one in result]


@contextmanager
def prometheus(folder: Path, target: int, rules: Path = ALERTS) -> Iterator[Prometheus]:
    """Prometheus with the example's configuration, but for intervals, ports and places."""
    assert PROMETHEUS is not None
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(rules)]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{target}"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    server = subprocess.Popen(
        [
            PROMETHEUS,
            "--config.file=prometheus.yml",
            f"--web.listen-address=127.0.0.1:{port}",
            f"--storage.tsdb.path={folder / 'data'}",
        ],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield Prometheus(port)
    finally:
        server.terminate()
        server.wait(PATIENCE_S)


def is_scraped(server: Prometheus) -> bool:
    try:
        return server.values("shardwise_logged_step") != []
    except OSError:
        return False


def test_prometheus_scrapes_a_training(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    pytest.importorskip("transformers")
    port = free_port()
    saves = {"every": 20}
    with (
        training(tmp_path, metrics={"port": port}, checkpoint=saves) as run,
        prometheus(tmp_path, port) as server,
    ):
        run.wait_until(lambda: is_scraped(server))
        check_values(server, run)
        check_panels(server, run)
        check_alerts(server)
        run.stop()


def test_an_alert_fires_for_a_run_that_was_killed(tmp_path: Path) -> None:
    """In rules whose minutes are seconds, and whose hours are minutes."""
    pytest.importorskip("prometheus_client")
    pytest.importorskip("transformers")
    faster = re.sub(r"(\d+)m\b", r"\1s", ALERTS.read_text())
    rules = tmp_path / "alerts.yml"
    rules.write_text(re.sub(r"(\d+)h\b", r"\1m", faster))
    port = free_port()

    def fired() -> set[str]:
        query = 'count_over_time(ALERTS{alertstate="firing"}[5m])'
        return {one["metric"]["alertname"] for one in server.get("query", query=query)["result"]}

    with (
        training(tmp_path, metrics={"port": port}) as run,
        prometheus(tmp_path, port, rules) as server,
    ):
        run.wait_until(lambda: is_scraped(server))
        # Longer than the time after which a stalled run is reported.
        run.wait_until(lambda: server.values("shardwise_running offset 20s"))
        assert not fired() & {"ShardwiseRunGone", "ShardwiseRunStalled"}
        run.process.kill()
        deadline = time.monotonic() + PATIENCE_S
        while "ShardwiseRunGone" not in fired():
            assert time.monotonic() < deadline, "it did not fire"
            time.sleep(0.5)
        assert "ShardwiseRunStalled" not in fired()


def check_values(server: Prometheus, run: Running) -> None:
    """What Prometheus stores of a step is what metrics.jsonl says of it."""
    stored = server.get("query", query='{__name__=~"shardwise_.*"}')["result"]
    found = {one["metric"]["__name__"]: float(one["value"][1]) for one in stored}
    # All samples of one scrape are of one log line.
    line = run.wait_until(lambda: run.logged().get(int(found["shardwise_logged_step"])))
    assert found["shardwise_loss"] == line["loss"]
    assert found["shardwise_step_seconds"] == line["step_s"]
    assert found["shardwise_running"] == 1
    [target] = server.get("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")


def check_panels(server: Prometheus, run: Running) -> None:
    run.wait_until(lambda: server.values("shardwise_checkpoint_step"))
    for title, queries in panel_queries().items():
        for query in queries:
            if query.startswith(ABSENT):
                assert server.values(query) == [], title
            else:
                # Rates need two samples.
                assert run.wait_until(partial(server.values, query)), title


def check_alerts(server: Prometheus) -> None:
    [group] = server.get("rules")["groups"]
    rules = {rule["name"]: rule for rule in group["rules"]}
    assert set(rules) == set(alert_queries())
    for rule in rules.values():
        assert (rule["health"], rule.get("lastError", "")) == ("ok", ""), rule
        # A healthy, young run raises none; the prediction of a CPU's time may be wrong.
        if rule["name"] != "ShardwiseSlowerThanPredicted":
            assert rule["state"] == "inactive", rule
