"""What mkdocs calls while it builds: marks in pages become what the code says."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from make.accepted import accepted_lines, accepted_table
from make.answer_tables import answer_table, reasons_table
from make.answers import plan_schema, whatif_schema
from make.commands import commands_page, questions_table
from make.contribution import contribution_schema
from make.fields import fields_table, keys_table, profile_schema
from make.gallery import gallery
from make.live import live_form
from make.llms import as_markdown, llms_text
from make.metrics import FILES, alerts_table, fleet_file, metrics_table
from make.schema import run_schema
from make.tables import card_table, mfu_table, public_names, regimes_table, traffic_table
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

MAKERS = {
    "fields": fields_table,
    "keys": keys_table,
    "commands": commands_page,
    "questions": questions_table,
    "names": public_names,
    "traffic": traffic_table,
    "mfu": mfu_table,
    "regimes": regimes_table,
    "cards": card_table,
    "metrics": metrics_table,
    "alerts": alerts_table,
    "answer": answer_table,
    "reasons": reasons_table,
    "accepted": accepted_table,
    "seen": accepted_lines,
    "gallery": gallery,
    "live": live_form,
}
MARK = re.compile(rf"<!-- ({'|'.join(MAKERS)})(?:: (.+?))? -->")
# Pages as Markdown, with their marks replaced, by their path.
WRITTEN: dict[str, str] = {}


def on_config(config: Any) -> Any:
    """Take the address of the site from who publishes it; without one, links stay relative."""
    config.site_url = os.environ.get("SITE_URL") or config.site_url
    return config


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Replace each mark with what it names."""
    made = MARK.sub(lambda mark: MAKERS[mark[1]](*(mark[2] or "").split()), markdown)
    WRITTEN[page.file.src_uri] = as_markdown(made)
    return made


def on_files(files: Files, config: Any) -> Files:
    """Add files to download: schemas, files for Prometheus, and llms.txt."""
    for path, content in downloads(config).items():
        files.append(File.generated(config, path, content=content))
    return files


def on_post_build(config: Any) -> None:
    """Write each page as Markdown beside its HTML: relative links lead from one to the next."""
    for path, markdown in WRITTEN.items():
        (Path(config.site_dir) / path).write_text(markdown, encoding="utf-8")


def downloads(config: Any) -> dict[str, str]:
    """Files beside the pages, by their path on the site."""
    site = config.site_url or ""
    found = {f"fleet/{name}": fleet_file(name) for name in FILES}
    for path, schema in schemas().items():
        address = {"$id": urljoin(site, path)} if site else {}
        found[path] = json.dumps({**address, **schema}, indent=1)

    def read(path: str) -> str:
        return (Path(config.docs_dir) / path).read_text(encoding="utf-8")

    told = {path: schema["description"] for path, schema in schemas().items()}
    about = (config.site_name, config.site_description)
    found["llms.txt"] = llms_text(*about, config.nav, read, told, site)
    return found


def schemas() -> dict[str, dict[str, Any]]:
    """JSON schemas by their path on the site, which does not change."""
    return {
        "reference/run.schema.json": run_schema(),
        "reference/step-profile.schema.json": profile_schema("shardwise.step.profile.StepProfile"),
        "reference/contribution.schema.json": contribution_schema(),
        "reference/plan.schema.json": plan_schema(),
        "reference/whatif.schema.json": whatif_schema(),
    }
