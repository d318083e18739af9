"""The result of an acceptance: its verdict, and its JSON and file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.predict.api import estimate_run
from shardwise.spec.cluster import ClusterSpec
from shardwise.trials.accept.bench import TrainedRun
from shardwise.trials.accept.checks import CompletedCheck
from shardwise.trials.accept.line import not_run
from shardwise.trials.accept.machine import MAX_BUSY, Machine

SCHEMA = 1


class Result(NamedTuple):
    """The checks of an acceptance with their lines; `runs` are the trained runs, by layout."""

    machine: Machine
    checked: Sequence[CompletedCheck]
    runs: dict[str, TrainedRun]
    # The cluster that `calibrate` measured; None if it was not run.
    calibrated: ClusterSpec | None
    seconds: float
    # The name of the signal that stopped it.
    stopped_by: str = ""

    @property
    def failed(self) -> int:
        """The number of failed lines."""
        return self.count("failed")

    @property
    def passed(self) -> bool:
        """Whether at least one line is ok, none failed, and no signal stopped the checks."""
        return self.count("ok") > 0 and self.failed == 0 and not self.stopped_by

    def count(self, verdict: str) -> int:
        """The number of lines with this verdict."""
        return sum(line.verdict == verdict for one in self.checked for line in one.lines)

    def to_dict(self) -> dict[str, Any]:
        """The content of the result file, and what `--json` prints.

        `runs` hold StepProfiles: the prediction of the catalogue, the measurement, and the
        prediction after `calibrate`.
        """
        from shardwise.trainer.folder import versions

        machine = self.machine._asdict()
        known = machine.pop("known")
        if known is not None:
            machine["catalogue"] = known.name
        return {
            "schema": SCHEMA,
            "kind": "accept",
            "date": datetime.now(UTC).date().isoformat(),
            "passed": self.passed,
            **({"stopped_by": self.stopped_by} if self.stopped_by else {}),
            "seconds": round(self.seconds, 1),
            "versions": versions(),
            "machine": {**machine, "cores": os.cpu_count()},
            "checks": [
                {
                    "check": one.name,
                    "seconds": round(one.seconds, 1),
                    "lines": [line.to_dict() for line in one.lines],
                }
                for one in self.checked
            ],
            "runs": [self._run(name, one) for name, one in self.runs.items()],
        }

    def _run(self, name: str, trained: TrainedRun) -> dict[str, Any]:
        """The entry of a trained run in the result file."""
        found: dict[str, Any] = {
            "layout": name,
            "busy_share": round(trained.busy, 3),
            "predicted": trained.predicted.to_dict(),
            "measured": trained.measured.to_dict(),
        }
        if self.calibrated is not None:
            after = estimate_run(trained.run._replace(cluster=self.calibrated))
            found["calibrated"] = after.to_dict()
        # Times measured on a busy machine are no evidence.
        if trained.contribution is not None and trained.busy <= MAX_BUSY:
            found["contribution"] = trained.contribution.to_dict()
        return found


def with_missing_checks(
    checked: Sequence[CompletedCheck], names: Sequence[str], reason: str
) -> list[CompletedCheck]:
    """The checks in `names`, in order.

    Those that were not begun, or have no line, get a "not run" line with the reason.
    """
    by_name = {one.name: one for one in checked}
    found = []
    for name in names:
        one = by_name.get(name, CompletedCheck(name, [], 0.0))
        lines = one.lines or [not_run(name, "runs to its end", reason)]
        found.append(one._replace(lines=lines))
    return found


def write_result(path: Path, result: Result) -> None:
    path.write_text(json.dumps(result.to_dict(), indent=1, allow_nan=False) + "\n")
