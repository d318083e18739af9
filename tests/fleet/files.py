"""The dashboard and the alert rules in examples/fleet, and the metrics they name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from tests.command import ROOT

FOLDER = ROOT / "examples" / "fleet"
DASHBOARD = FOLDER / "dashboard.json"
ALERTS = FOLDER / "alerts.yml"


def dashboard() -> dict[str, Any]:
    return dict(json.loads(DASHBOARD.read_text()))


def panel_queries() -> dict[str, list[str]]:
    """The queries of each panel, by title, for all runs."""
    return {
        panel["title"]: [target["expr"].replace("$run", ".*") for target in panel["targets"]]
        for panel in dashboard()["panels"]
    }


def alert_queries() -> dict[str, str]:
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule["expr"] for rule in group["rules"]}


def metric_names(path: Path) -> set[str]:
    return set(re.findall(r"\bshardwise_\w+", path.read_text()))
