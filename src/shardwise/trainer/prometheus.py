"""Metrics of a run for Prometheus: an HTTP endpoint, a textfile for node_exporter, or both.

The training thread only replaces a small record at each log line. Other threads compute samples
when Prometheus asks for them, or every few seconds for the textfile.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.launch.supervisor import count_recoveries
from shardwise.runs.record import name_of
from shardwise.spec.record import SpecError, SpecWarning
from shardwise.spec.train import MetricsSettings
from shardwise.trainer import metric_names as names
from shardwise.trainer.metric_names import Metric
from shardwise.trainer.periodic import Periodic
from shardwise.trainer.run_record import Progress

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as Family


class LiveRun(NamedTuple):
    """The constants of a run, and functions for its progress, as a scrape reads them."""

    folder: Path
    # Values of the labels of `shardwise_run_info`.
    labels: Mapping[str, str]
    planned_steps: int
    progress: Progress
    predicted_step_s: float | None = None
    predicted_memory_bytes: int | None = None


class _Logged(NamedTuple):
    """The step of the last log line, the newest value of each name, and skipped steps so far.

    Values that the last line lacks are those of earlier lines.
    """

    step: int | None = None
    values: Mapping[str, float] = {}
    skipped: float = 0.0


class RunCollector:
    """Computes the Prometheus samples of a run at each scrape."""

    def __init__(self, run: LiveRun) -> None:
        self._run = run
        self._logged = _Logged()
        self.running = True

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # A new record: a scrape sees one line or the next, never half of each.
        last = self._logged
        skipped = last.skipped + values.get("skipped", 0.0)
        self._logged = _Logged(step, {**last.values, **values}, skipped)

    def collect(self) -> Iterator[Family]:
        """Yield one metric family for each metric that has a value.

        prometheus_client calls this in its thread.
        """
        run, (logged_step, values, skipped) = self._run, self._logged
        yield self._family(names.INFO, {tuple(run.labels.values()): 1})
        single: dict[Metric, float | None] = {
            names.RUNNING: float(self.running),
            names.STEP: run.progress.completed_steps(),
            names.PLANNED_STEPS: run.planned_steps,
            names.LOGGED_STEP: logged_step,
            names.SKIPPED: skipped,
            names.RECOVERIES: count_recoveries(run.folder),
            names.CHECKPOINT_STEP: run.progress.checkpoint_step(),
            names.PREDICTED_STEP: run.predicted_step_s,
            names.PREDICTED_MEMORY: run.predicted_memory_bytes,
            **{metric: values.get(key) for key, metric in names.LOGGED.items()},
        }
        for metric, value in single.items():
            if value is not None:
                yield self._family(metric, {(): value})
        memory: dict[tuple[str, ...], float] = {
            (kind,): values[key] for key, kind in names.MEMORY_KINDS.items() if key in values
        }
        if memory:
            yield self._family(names.MEMORY, memory)

    def _family(self, metric: Metric, samples: Mapping[tuple[str, ...], float]) -> Family:
        """A metric family with one sample for each tuple of label values in `samples`."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(metric.name, metric.help, labels=("run", *metric.labels))
        for labels, value in samples.items():
            family.add_metric((name_of(self._run.folder), *labels), value)
        return family


class Exporter:
    """A tracker that serves or writes the metrics of a run."""

    def __init__(self, settings: MetricsSettings, run: LiveRun) -> None:
        self._collector = RunCollector(run)
        self.log = self._collector.log
        self._registry = _registry(self._collector)
        self._endpoint: Any = None
        if settings.port is not None:
            self._endpoint = _serve(self._registry, settings.address, settings.port)
        self._textfile: Periodic | None = None
        if settings.textfile is not None:
            self._textfile = _textfile(settings, name_of(run.folder), self._registry)

    def close(self) -> None:
        """Close the endpoint, and write the textfile a last time, with `running` 0."""
        self._collector.running = False
        if self._textfile is not None:
            self._textfile.close()
        if self._endpoint is not None:
            self._endpoint.shutdown()
            self._endpoint.server_close()


def _textfile(settings: MetricsSettings, run: str, registry: CollectorRegistry) -> Periodic:
    """Start to write the metrics of the registry into a file every few seconds."""
    from prometheus_client import write_to_textfile

    folder = Path(settings.textfile or ".")
    if not folder.is_dir():
        raise SpecError(
            f"train.metrics.textfile: folder {folder} does not exist; create it, or name the "
            "folder that node_exporter reads"
        )
    path = str(folder / f"shardwise-{run.replace('/', '-')}.prom")
    every_s = settings.textfile_every_s
    return Periodic(lambda: write_to_textfile(path, registry), every_s, f"write {path}")


def _registry(collector: RunCollector) -> CollectorRegistry:
    """A registry of this collector alone; raises SpecError without prometheus_client."""
    try:
        from prometheus_client import CollectorRegistry
    except ModuleNotFoundError:
        raise SpecError(
            "train.metrics: needs the package prometheus_client; install it with "
            "'pip install shardwise[metrics]', or remove [train.metrics]"
        ) from None
    # Not the default registry: it would add the metrics of Python and of the process.
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


def _serve(registry: CollectorRegistry, address: str, port: int) -> Any:
    """Start the HTTP endpoint and return its server; None, with a warning, if it cannot listen.

    Training is worth more than its metrics: a restart may find the port taken.
    """
    from prometheus_client import start_http_server

    try:
        server, _ = start_http_server(port, address, registry)
    except OSError as error:
        warnings.warn(
            f"train.metrics: cannot listen on {address}:{port} ({error.strerror or error}); this "
            "run trains without an endpoint; use another port or address",
            SpecWarning,
            stacklevel=2,
        )
        return None
    return server
