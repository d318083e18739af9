"""The tables of published kernels, cleaned: rows with numbers, a device's name and a source."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

# Beside the project: they are not ours to ship.
FOLDER = Path(__file__).resolve().parents[3] / "shared" / "validation" / "kernels"
# Names of the tables, and those of `shardwise catalog devices`; others have the same name.
DEVICES = {
    "A100-SXM": "A100-80GB",
    "A100-PCIe": "A100-PCIe-80GB",
    "H200": "H200-SXM",
}
# Bandwidth-limited exports of a device: what they compute and move is what the device does.
SAME_SILICON = {"H800": "H100-SXM"}
SERVING = "ai-dynamo/aiconfigurator"
# Repositories that hold several studies, which their versions tell apart.
COLLECTIONS = ("NVIDIA/cudnn-frontend", "Dao-AILab/flash-attention@")
# Beside the rows that are marked: a developer's H100 on which FA3 is slower than Triton.
DOUBTED = ("meta-pytorch/tritonbench issue 141",)


class Row(NamedTuple):
    """One measured kernel: the cells of its row, and what every form needs."""

    device: str
    # Repository, thread or title; of a collection of benchmarks, the benchmark too.
    source: str
    cells: dict[str, str]

    def number(self, name: str) -> float:
        """A cell's number; 0 where nothing was published."""
        return float(self.cells[name] or 0)

    @property
    def peak(self) -> float:
        """Dense FLOP/s of the device in the dtype of the row."""
        return self.number("peak_tflops") * 1e12

    @property
    def flops(self) -> float:
        return self.number("tflops") * self.number("ms") * 1e9


@cache
def read(table: str) -> tuple[Row, ...]:
    """All rows of a table that may be fitted."""
    with (FOLDER / f"{table}.csv").open(encoding="utf-8") as file:
        return tuple(_cleaned(csv.DictReader(file)))


def _cleaned(rows: Iterable[dict[str, str]]) -> Iterator[Row]:
    for cells in rows:
        # Weights that were never initialised are mostly zeros: the clock stays higher.
        if "SUSPICIOUS" in cells["note"] or cells.get("inputs") == "uninitialised weights":
            continue
        if cells["source"] in DOUBTED:
            continue
        device = SAME_SILICON.get(cells["device"], DEVICES.get(cells["device"], cells["device"]))
        yield Row(device, _source(cells), cells)


def _source(cells: dict[str, str]) -> str:
    """The name of a study: its repository or thread, and its part where it has several."""
    repository = cells["source"].partition("@")[0]
    if repository == SERVING:
        # Each framework brings kernels and a harness of its own, each NCCL its protocols.
        framework = cells["where"].split("/")[2]
        return f"{repository}, {cells['library'] if framework == 'nccl' else framework}"
    if cells["source"].startswith(COLLECTIONS):
        return f"{repository}, {_version(cells['version'])}"
    return repository


def _version(text: str) -> str:
    """A version as people write it: cuDNN 9.19.1 for 91901."""
    packed = re.match(r"cudnn (\d)(\d\d)(\d\d)", text)
    return f"cuDNN {packed[1]}.{int(packed[2])}.{int(packed[3])}" if packed else text
