"""The dashboard, checked against Grafana's own Python and TypeScript types of a dashboard."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shardwise.trainer.metric_names import METRICS
from tests.fleet.files import ALERTS, DASHBOARD, dashboard, metric_names

KNOWN = {metric.name for metric in METRICS}


@pytest.mark.parametrize("path", [DASHBOARD, ALERTS], ids=lambda path: path.name)
def test_dashboard_and_alerts_name_metrics_that_exist(path: Path) -> None:
    named = metric_names(path)
    assert len(named) > 5
    assert named <= KNOWN


def test_panels_fill_the_grid_and_do_not_overlap() -> None:
    cells: list[tuple[int, int]] = []
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        columns, rows = range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])
        cells += itertools.product(columns, rows)
    assert len(set(cells)) == len(cells)
    # Grafana's grid has 24 columns.
    assert len(cells) == 24 * (1 + max(row for _, row in cells))


def lost(before: Any, after: Any, at: str = "") -> list[str]:
    """Paths of what is in `before` and is missing or another in `after`."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [one for key in before for one in lost(before[key], after.get(key), f"{at}/{key}")]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = zip(before, after, strict=True)
        return [one for n, pair in enumerate(pairs) for one in lost(*pair, f"{at}/{n}")]
    return [] if before == after else [at]


def test_grafanas_own_classes_keep_every_key() -> None:
    """Their reader drops what the schema does not have."""
    pytest.importorskip("grafana_foundation_sdk")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()

    def read_and_written(source: dict[str, Any]) -> Any:
        return json.loads(JSONEncoder().encode(Dashboard.from_json(source)))

    ours = dashboard()
    assert lost(ours, read_and_written(ours)) == []
    wrong = copy.deepcopy(ours)
    wrong["panels"][0]["options"]["colourMode"] = "value"
    assert lost(wrong, read_and_written(wrong)) == ["/panels/0/options/colourMode"]


@pytest.mark.nightly
def test_grafanas_typescript_types_accept_it(tmp_path: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs npm: the types of a dashboard come as a package of npm")
    packages = ["typescript@5", "@grafana/schema@11.6.0"]
    subprocess.run(
        [npm, "install", "--no-audit", "--no-fund", "--prefix", str(tmp_path), *packages],
        check=True, capture_output=True,
    )  # fmt: skip

    def problems(text: str) -> str:
        # The one enumeration whose values are texts: TypeScript takes them only by name.
        literal = text.replace('"type": "value"', '"type": MappingType.ValueToText')
        names = "import { type Dashboard, MappingType } from '@grafana/schema';"
        (tmp_path / "check.ts").write_text(f"{names}\nexport const it: Dashboard = {literal};\n")
        done = subprocess.run(
            [tmp_path / "node_modules" / ".bin" / "tsc", "--noEmit", "--strict", "--skipLibCheck",
             "--moduleResolution", "node", "--target", "es2020", "check.ts"],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.stdout

    text = DASHBOARD.read_text()
    assert problems(text) == ""
    assert "not assignable to type 'string'" in problems(
        text.replace('"refresh": "30s"', '"refresh": 30')
    )
    assert "colourMode" in problems(text.replace('"graphTooltip"', '"colourMode"'))
