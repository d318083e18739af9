"""The metrics of a run as Prometheus' own client reads them: collector, endpoint and textfile."""

from __future__ import annotations

import socket
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.spec.record import SpecError, SpecWarning
from shardwise.spec.train import MetricsSettings
from shardwise.trainer.metric_names import LOGGED, MEMORY_KINDS, METRICS
from shardwise.trainer.prometheus import Exporter, LiveRun
from shardwise.trainer.run_record import Progress
from tests.distributed.launch import free_port
from tests.fleet.running import training

pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families

Samples = dict[str, dict[tuple[str, ...], float]]


def read(text: str) -> Samples:
    """Values by name and by the values of labels, sorted by label, but for `run`, always `it`."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == "it"
            found.setdefault(sample.name, {})[tuple(labels[key] for key in sorted(labels))] = (
                sample.value
            )
    return found


def scrape(port: int) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return read(answer.read().decode())


def live(folder: Path, **predicted: Any) -> LiveRun:
    labels = {"model": "m", "strategy": "s", "cluster": "c", "version": "v"}
    progress = Progress(lambda: 7, lambda: 6, lambda: None, dict)
    return LiveRun(folder / "it", labels, planned_steps=100, progress=progress, **predicted)


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[Exporter]:
    (tmp_path / "it").mkdir()
    settings = MetricsSettings(textfile=str(tmp_path), textfile_every_s=3600)
    opened = Exporter(settings, live(tmp_path, predicted_step_s=0.5))
    yield opened
    opened.close()


def written(exporter: Exporter, folder: Path) -> Samples:
    exporter.close()
    return read((folder / "shardwise-it.prom").read_text())


def test_every_value_of_a_log_line_has_a_metric(exporter: Exporter, tmp_path: Path) -> None:
    keys = [*LOGGED, *MEMORY_KINDS]
    values = {key: float(number) for number, key in enumerate(keys, 1)}
    exporter.log(10, values)
    found = written(exporter, tmp_path)
    for key, metric in LOGGED.items():
        assert found[metric.name] == {(): values[key]}
    memory = {(kind,): values[key] for key, kind in MEMORY_KINDS.items()}
    assert found["shardwise_memory_bytes"] == memory
    assert set(found) <= {metric.name for metric in METRICS}


def test_the_run_itself(exporter: Exporter, tmp_path: Path) -> None:
    (tmp_path / "it" / "recoveries.jsonl").write_text('{"attempt": 1}\n{"attempt": 2}\n')
    exporter.log(1, {"loss": 3.0, "skipped": 1.0})
    exporter.log(5, {"loss": 2.0, "skipped": 2.0})
    found = written(exporter, tmp_path)
    assert found["shardwise_run_info"] == {("c", "m", "s", "v"): 1}
    expected = {
        "running": 0, "step": 7, "planned_steps": 100, "logged_step": 5, "loss": 2.0,
        "skipped_steps_total": 3, "recoveries_total": 2, "checkpoint_step": 6,
        "predicted_step_seconds": 0.5,
    }  # fmt: skip
    assert {name: found[f"shardwise_{name}"][()] for name in expected} == expected
    # What is not known is absent, not zero.
    assert "shardwise_predicted_memory_bytes" not in found
    assert "shardwise_tokens_per_second" not in found


def test_a_port_that_is_taken_does_not_stop_the_run(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.warns(SpecWarning, match=f"127.0.0.1:{port}"):
            exporter = Exporter(MetricsSettings(port=port), live(tmp_path))
    exporter.log(1, {"loss": 1.0})
    exporter.close()


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="train.metrics.textfile: .*gone"):
        Exporter(MetricsSettings(textfile=str(tmp_path / "gone")), live(tmp_path))


def test_the_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(SpecError, match=r"shardwise\[metrics\]"):
        Exporter(MetricsSettings(port=9400), live(tmp_path))


def test_a_section_that_gives_metrics_to_nobody_is_refused() -> None:
    with pytest.raises(SpecError, match="train.metrics: .*port, textfile"):
        MetricsSettings.read({"address": "0.0.0.0"}, where="train.metrics")


def test_a_training_is_scraped_and_leaves_a_textfile(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    port = free_port()
    metrics = {"port": port, "textfile": str(tmp_path), "textfile_every_s": 0.2}
    with training(tmp_path, metrics=metrics) as run:
        run.wait_until(lambda: len(run.logged()) >= 3)
        found = scrape(port)
        step = int(found["shardwise_logged_step"][()])
        # The line may be in the buffer of a process that a scrape interrupted.
        line = run.wait_until(lambda: run.logged().get(step))
        for key, metric in LOGGED.items():
            assert found.get(metric.name, {}).get(()) == line.get(key)
        assert line["loss"] > 0
        assert found["shardwise_step"][()] >= step - 1
        assert found["shardwise_running"] == {(): 1}
        run.wait_until(lambda: scrape(port)["shardwise_step"][()] > found["shardwise_step"][()])
        during = read((tmp_path / "shardwise-it.prom").read_text())
        assert during["shardwise_running"] == {(): 1}
        run.stop()
    last = max(run.logged())
    after = read((tmp_path / "shardwise-it.prom").read_text())
    assert after["shardwise_running"] == {(): 0}
    assert after["shardwise_step"] == after["shardwise_checkpoint_step"] == {(): last}
    with pytest.raises(OSError, match="refused"):
        scrape(port)


def test_no_port_opens_unless_one_is_configured(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    psutil = pytest.importorskip("psutil")
    with training(tmp_path, metrics={"textfile": str(tmp_path)}) as run:
        run.wait_until(lambda: len(run.logged()) >= 3)
        connections = psutil.Process(run.process.pid).net_connections(kind="all")
        assert [one for one in connections if one.status == psutil.CONN_LISTEN] == []
        run.stop()
