"""Metrics for Prometheus and the alerts on them, as tables; their files, to download."""

from __future__ import annotations

from pathlib import Path

import yaml

from shardwise.trainer.metric_names import METRICS

FILES = ("prometheus.yml", "alerts.yml", "dashboard.json")
_FOLDER = Path(__file__).resolve().parents[2] / "examples" / "fleet"


def metrics_table() -> str:
    """A Markdown table of every metric."""
    rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(rows)


def alerts_table() -> str:
    """A Markdown table of every alert rule."""
    rows = ["| alert | severity | fires when |", "|---|---|---|"]
    [group] = yaml.safe_load(fleet_file("alerts.yml"))["groups"]
    for rule in group["rules"]:
        condition = " ".join(rule["expr"].split())
        waits = f", for {rule['for']}" if "for" in rule else ""
        severity = rule["labels"]["severity"]
        rows.append(f"| `{rule['alert']}` | {severity} | `{condition}`{waits} |")
    return "\n".join(rows)


def fleet_file(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
