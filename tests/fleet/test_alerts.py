"""The alert rules, checked by Prometheus' own tool: their syntax, and when they fire."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fleet.files import ALERTS, FOLDER, alert_queries, panel_queries

PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(
    PROMTOOL is None, reason="needs promtool: apt-get install prometheus"
)


def promtool(*words: str) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *words], capture_output=True, text=True, check=False)


def test_rules_and_configuration_are_valid() -> None:
    done = promtool("check", "rules", str(ALERTS))
    assert f"{len(alert_queries())} rules found" in done.stdout
    assert done.returncode == 0, done.stderr
    done = promtool("check", "config", str(FOLDER / "prometheus.yml"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_queries_of_the_dashboard_are_valid(tmp_path: Path) -> None:
    """As recording rules, which promtool parses."""
    queries = [query for panel in panel_queries().values() for query in panel]
    rules = tmp_path / "rules.yml"

    def checked(queries: list[str]) -> subprocess.CompletedProcess[str]:
        group = {"name": "all", "rules": [{"record": "it", "expr": one} for one in queries]}
        rules.write_text(json.dumps({"groups": [group]}))
        return promtool("check", "rules", "--lint=none", str(rules))

    done = checked(queries)
    assert f"{len(queries)} rules found" in done.stdout
    assert done.returncode == 0, done.stderr
    assert "parse error" in checked([*queries, "rate(shardwise_step[5m]"]).stderr


# A run over 12 hours, one sample a minute; what a case gives replaces these. `a+bxn` is a, then n
# more samples, each b larger; `_` is a minute without a sample.
HEALTHY = {
    "shardwise_running": "1x720",
    "shardwise_step": "0+10x720",
    "shardwise_planned_steps": "100000x720",
    "shardwise_checkpoint_step": "0+10x720",
    "shardwise_step_seconds": "6x720",
    "shardwise_predicted_step_seconds": "5x720",
    "shardwise_loss": "4-0.001x720",
    "shardwise_skipped_steps_total": "0x720",
    "shardwise_recoveries_total": "0x720",
}
STEPS_STOP = "0+10x680 6800x40"
# What Prometheus stores when a target is gone.
GONE = "stale _x1600"
# What differs, minutes after the start, and the alerts that fire then.
CASES: dict[str, tuple[dict[str, str], int, set[str]]] = {
    "a healthy run": ({}, 720, set()),
    "a young run": ({}, 3, set()),
    "no steps for 20 minutes": ({"shardwise_step": STEPS_STOP}, 700, {"ShardwiseRunStalled"}),
    "no steps for 10 minutes": ({"shardwise_step": STEPS_STOP}, 690, set()),
    "a textfile of a run that ended": (
        {"shardwise_step": STEPS_STOP, "shardwise_running": "1x680 0x40"}, 715, set(),
    ),
    "gone for 7 minutes": (
        {name: f"{series} {GONE}" for name, series in HEALTHY.items()}, 727,
        {"ShardwiseRunGone"},
    ),
    "gone for 40 minutes": (
        {name: f"{series} {GONE}" for name, series in HEALTHY.items()}, 760,
        {"ShardwiseRunGone"},
    ),
    "gone for 23 hours": (
        {name: f"{series} {GONE}" for name, series in HEALTHY.items()}, 720 + 23 * 60,
        {"ShardwiseRunGone"},
    ),
    "gone, and back on another host": (
        {name: f"{series} {GONE}" for name, series in HEALTHY.items()}
        | {'shardwise_running{run="it", instance="other"}': "_x722 1x20"}, 730, set(),
    ),
    "gone after its last step": (
        {name: f"{series} {GONE}" for name, series in HEALTHY.items()}
        | {"shardwise_planned_steps": f"7200x720 {GONE}"}, 727, set(),
    ),
    "slower by a third for half an hour": (
        {"shardwise_step_seconds": "6x680 8x40"}, 715,
        {"ShardwiseStepSlower", "ShardwiseSlowerThanPredicted"},
    ),
    "one slow log line": ({"shardwise_step_seconds": "6x700 8 6x19"}, 702, set()),
    "twice as slow as predicted from the start": (
        {"shardwise_step_seconds": "10x720"}, 100, {"ShardwiseSlowerThanPredicted"},
    ),
    "the loss doubles": ({"shardwise_loss": "3x680 6x40"}, 710, {"ShardwiseLossRising"}),
    "an update is skipped": (
        {"shardwise_skipped_steps_total": "0x700 1x20"}, 710, {"ShardwiseStepsSkipped"},
    ),
    "four restarts within an hour": (
        {"shardwise_recoveries_total": "0x670 1x10 2x10 3x10 4x20"}, 715,
        {"ShardwiseRestartsOften"},
    ),
    "one restart": ({"shardwise_recoveries_total": "0x670 1x50"}, 700, set()),
    "no checkpoint for an hour": (
        {"shardwise_checkpoint_step": "0+10x600 6000x120"}, 690, {"ShardwiseCheckpointsStale"},
    ),
    "never a checkpoint": (
        {"shardwise_checkpoint_step": ""}, 90, {"ShardwiseCheckpointsStale"},
    ),
}  # fmt: skip


def fired(series: dict[str, str], minutes: int, folder: Path) -> set[str]:
    """The alerts that fire: told that none does, promtool names each that it got."""
    samples = [
        {"series": name if "{" in name else f'{name}{{run="it"}}', "values": values}
        for name, values in series.items()
        if values
    ]
    silent = [{"eval_time": f"{minutes}m", "alertname": alert} for alert in alert_queries()]
    test = {"interval": "1m", "input_series": samples, "alert_rule_test": silent}
    (folder / "test.yml").write_text(json.dumps({"rule_files": [str(ALERTS)], "tests": [test]}))
    done = promtool("test", "rules", str(folder / "test.yml"))
    said = done.stdout + done.stderr
    found = set(re.findall(r"alertname: (\w+)", said))
    # Any other failure would name no alert.
    assert bool(found) == bool(done.returncode), said
    return found


@pytest.mark.parametrize("name", CASES)
def test_alerts_fire_when_they_should_and_only_then(name: str, tmp_path: Path) -> None:
    changed, minutes, expected = CASES[name]
    assert fired({**HEALTHY, **changed}, minutes, tmp_path) == expected
