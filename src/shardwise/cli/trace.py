"""`shardwise trace`: where the time of a profiled run went."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.output import JsonOption, print_json


def trace(
    files: Annotated[
        list[Path],
        typer.Argument(help="Traces of torch.profiler, one per rank, or a folder of them."),
    ],
    rules: Annotated[
        Path | None,
        typer.Option(help="TOML with lists of name patterns: compute, communication, copy."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Read traces: what computed, what waited, what was idle, and for whom the others waited."""
    from shardwise.observe.classify import read_rules
    from shardwise.observe.summary import summarise
    from shardwise.report.trace import print_trace

    summary = summarise(_files(files), read_rules(rules) if rules else None)
    if not as_json:
        print_trace(summary)
        return
    print_json(
        {
            "schema": 1,
            "kind": "measured",
            "ranks": [
                {
                    "path": str(rank.path),
                    "rank": rank.rank,
                    "device": "cpu" if rank.on_cpu else "accelerator",
                    **rank.whole._asdict(),
                    "overlap": rank.whole.overlap,
                    "steps": [step._asdict() for step in rank.steps],
                    "collectives": [one._asdict() for one in rank.collectives],
                    "units": [unit._asdict() for unit in rank.units],
                    "problems": rank.problems,
                }
                for rank in summary.ranks
            ],
            "joined": None
            if summary.joined is None
            else {
                "collectives": int(summary.joined.start_ns.shape[1]),
                "mean_ns": summary.joined.mean_ns,
                "transfer_ns": summary.joined.transfer_ns,
                "last_to_arrive": summary.joined.last_to_arrive().tolist(),
                "unmatched": summary.joined.unmatched,
            },
        }
    )


def _files(given: list[Path]) -> list[Path]:
    """Files as they are; of a folder its traces."""
    from shardwise.spec.record import SpecError

    found: list[Path] = []
    for path in given:
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.name.endswith((".json", ".json.gz")))
            if not inside:
                raise SpecError(f"trace: {path} holds no .json or .json.gz")
            found += inside
        else:
            found.append(path)
    return found
