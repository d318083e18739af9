"""What has been seen where: tables from the result files of `shardwise doctor`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "accepted"
VERDICTS = ("ok", "failed", "not run")


def accepted_table() -> str:
    """A row per machine; a cell per check with the number of lines of each verdict."""
    results = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))
    ]
    names = list(dict.fromkeys(one["check"] for result in results for one in result["checks"]))
    rows = [
        f"| machine | date | torch | {' | '.join(names)} |",
        "|---" * (3 + len(names)) + "|",
        *(_row(result, names) for result in results),
    ]
    if all(result["machine"]["is_cpu"] for result in results):
        rows += ["", "**No GPU so far.** A result file from one is welcome."]
    return "\n".join(rows)


def _row(result: dict[str, Any], names: list[str]) -> str:
    machine, lines = result["machine"], {one["check"]: one["lines"] for one in result["checks"]}
    kind = "processes" if machine["is_cpu"] else "devices"
    where = f"{machine['device']}, {machine['processes']} {kind}, {machine['backend']}"
    cells = [_cell(lines.get(name, [])) for name in names]
    return f"| {where} | {result['date']} | {result['versions']['torch']} | {' | '.join(cells)} |"


def _cell(lines: list[dict[str, Any]]) -> str:
    counts = {one: sum(line["verdict"] == one for line in lines) for one in VERDICTS}
    return ", ".join(f"{number} {verdict}" for verdict, number in counts.items() if number)


def accepted_lines() -> str:
    """Everything that was seen, machine by machine; nothing is claimed for what was not run."""
    parts = []
    for path in sorted(FOLDER.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        machine = result["machine"]
        minutes = result["seconds"] / 60
        rows = [
            f"### {machine['device']}, {machine['processes']} × {machine['backend']}",
            "",
            f"`benchmarks/accepted/{path.name}`: {result['date']}, {minutes:.0f} minutes, "
            f"{machine['cores']} cores, Shardwise {result['versions']['shardwise']}, "
            f"Python {result['versions']['python']}.",
            "",
            "| check | what | expected | seen | verdict |",
            "|---|---|---|---|---|",
        ]
        for one in result["checks"]:
            rows += [_line(one["check"], line) for line in one["lines"]]
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def _line(check: str, line: dict[str, Any]) -> str:
    verdict = line["verdict"] + (f": {line['reason']}" if "reason" in line else "")
    cells = (check, line["what"], line["expected"], line.get("seen", ""), verdict)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
