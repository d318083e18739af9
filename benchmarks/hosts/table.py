"""The table of docs/faults.md: a row for each fault of a host, over all cases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.hosts.cases import Outcome
from benchmarks.hosts.cluster import ROOT
from benchmarks.hosts.faults import FAULTS
from benchmarks.page import rows, write_section

PAGE = ROOT / "docs" / "faults.md"
HEAD = (
    *("Fault", "Cases", "Survived", "Same result", "Right host blamed"),
    *("Noticed after", "Recovered after"),
)


def write_table(outcomes: Sequence[Outcome], page: Path = PAGE) -> None:
    body = []
    for fault in FAULTS.values():
        found = [one for one in outcomes if one.case.startswith(f"{fault.name} at ")]
        if not found:
            continue
        blamed = [one.blamed_right for one in found if one.blamed_right is not None]
        # The last digits of sums differ with the number of hosts.
        same = f"{sum(one.same_end for one in found)}{'' if fault.same_size else ' (rounding)'}"
        body.append([
            *(fault.what, str(len(found)), str(sum(one.survived for one in found)), same),
            f"{sum(blamed)} of {len(blamed)}" if blamed else "nobody, rightly",
            _seconds([one.noticed_s for one in found]),
            _seconds([one.recovery_s for one in found]),
        ])  # fmt: skip
    write_section(page, "hosts", rows(HEAD, body))


def _seconds(values: Sequence[float | None]) -> str:
    """Median and longest."""
    found = [one for one in values if one is not None]
    return f"{median(found):.1f} s (longest {max(found):.1f} s)" if found else ""
