"""What mkdocs calls while it builds: marks in pages become what the code says."""

from __future__ import annotations

import json
import re
from typing import Any

from make.accepted import accepted_lines, accepted_table
from make.commands import commands_page
from make.fields import fields_table, keys_table, profile_schema
from make.metrics import FILES, alerts_table, fleet_file, metrics_table
from make.schema import run_schema
from make.tables import card_table, mfu_table, public_names, regimes_table, traffic_table
from mkdocs.structure.files import File, Files

MAKERS = {
    "fields": fields_table,
    "keys": keys_table,
    "commands": commands_page,
    "names": public_names,
    "traffic": traffic_table,
    "mfu": mfu_table,
    "regimes": regimes_table,
    "cards": card_table,
    "metrics": metrics_table,
    "alerts": alerts_table,
    "accepted": accepted_table,
    "seen": accepted_lines,
}
MARK = re.compile(rf"<!-- ({'|'.join(MAKERS)})(?:: (.+?))? -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace each mark with what it names."""
    return MARK.sub(lambda mark: MAKERS[mark[1]](*(mark[2] or "").split()), markdown)


def on_files(files: Files, config: Any) -> Files:
    """Add files to download: schemas for editors and programs, and files for Prometheus."""
    schemas = {
        "reference/run.schema.json": run_schema(),
        "reference/step-profile.schema.json": profile_schema("shardwise.step.StepProfile"),
    }
    for path, schema in schemas.items():
        content = json.dumps(schema, indent=1)
        files.append(File.generated(config, path, content=content))
    for name in FILES:
        files.append(File.generated(config, f"fleet/{name}", content=fleet_file(name)))
    return files
