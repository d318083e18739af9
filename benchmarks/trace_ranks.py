"""Time and memory of reading and joining the traces of many ranks.

    python benchmarks/trace_ranks.py [--json] [--ranks 1000]

The eight traces of a real run are copied under new rank numbers. One process per core reads them
and sends only the calls to the process that joins the ranks.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import tempfile
import time
from pathlib import Path

from shardwise.observe.diagnosis.verdicts import verdicts_of
from shardwise.observe.summary import summarise

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces" / "megatron_tp8_8rank"


def write(folder: Path, ranks: int) -> list[Path]:
    texts = []
    for rank in range(8):
        trace = json.loads(gzip.decompress((TRACES / f"rank{rank}.json.gz").read_bytes()))
        trace["distributedInfo"] |= {"rank": "RANK", "world_size": ranks}
        texts.append(json.dumps(trace))
    paths = []
    for rank in range(ranks):
        path = folder / f"rank{rank:05d}.json"
        path.write_text(texts[rank % 8].replace('"RANK"', str(rank)))
        paths.append(path)
    return paths


def resident_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(ranks: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        paths = write(Path(folder), ranks)
        before = resident_mb()
        start = time.perf_counter()
        summary = summarise(paths)
        verdicts_of(summary)
        took = time.perf_counter() - start
        size = sum(path.stat().st_size for path in paths)
    assert summary.joined is not None
    workers = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return {
        "ranks": ranks,
        "total_mb": size / 1e6,
        "seconds": took,
        "mb_per_s": size / 1e6 / took,
        "cores": os.cpu_count() or 1,
        "collectives": summary.joined.collectives,
        "parent_mb": resident_mb(),
        "parent_mb_before": before,
        "worker_mb": workers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ranks", type=int, default=1000)
    arguments = parser.parse_args()
    found = measure(arguments.ranks)
    if arguments.json:
        print(json.dumps(found))
        return
    print(
        f"{found['ranks']:,} ranks, {found['total_mb']:,.0f} MB of traces, in "
        f"{found['seconds']:.0f} s on {found['cores']} cores ({found['mb_per_s']:.0f} MB/s)"
    )
    print(
        f"peak memory: joining process {found['parent_mb']:.0f} MB "
        f"({found['parent_mb_before']:.0f} MB before), reading process "
        f"{found['worker_mb']:.0f} MB"
    )


if __name__ == "__main__":
    main()
