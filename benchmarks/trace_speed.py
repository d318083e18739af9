"""Speed of reading a trace, compared with HTA and with a lower bound.

    python benchmarks/trace_speed.py [--json] [--rounds 5] [--hta PYTHON]

Rounds are interleaved. The lower bound ("floor") decompresses the file and decodes its events into
typed records, and nothing else. HTA is measured with all columns if it is installed (`pip install
traceinsight`; --hta names the Python of another environment). Memory is that of a new process that
reads a trace of 345 MB, made by repeating a real one.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from shardwise.observe.file.events import Event
from shardwise.observe.file.trace import read_trace
from shardwise.observe.rank.classify import device_timeline
from shardwise.step.breakdown import breakdown

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
TRACE = TRACES / "hta" / "df_index_resolver_rank1of2_v100.json.gz"
LARGE_BYTES = 345_000_000

HTA = """
import sys, time, logging
logging.disable(logging.CRITICAL)
from hta.configs.parser_config import AVAILABLE_ARGS, ParserConfig
from hta.common.trace_parser import parse_trace_dataframe
config = ParserConfig(list(AVAILABLE_ARGS.values()))
start = time.perf_counter()
parse_trace_dataframe(sys.argv[1], config)
print(time.perf_counter() - start)
"""


class Events(msgspec.Struct):
    traceEvents: list[Event]  # noqa: N815


def ours() -> float:
    start = time.perf_counter()
    breakdown(device_timeline(read_trace(TRACE)))
    return time.perf_counter() - start


def floor() -> float:
    inflate: Any
    try:
        from isal import igzip as inflate
    except ImportError:
        inflate = gzip
    start = time.perf_counter()
    with inflate.open(TRACE, "rb") as file:
        msgspec.json.decode(file.read(), type=Events)
    return time.perf_counter() - start


def hta(python: str) -> float | None:
    done = subprocess.run(
        [python, "-c", HTA, str(TRACE)], capture_output=True, text=True, check=False
    )
    return float(done.stdout.split()[-1]) if done.returncode == 0 else None


def large_rss_mb() -> float:
    """Resident memory of a process that reads a trace made of many copies of a real one."""
    text = gzip.decompress(TRACE.read_bytes())
    begin = re.search(rb'"traceEvents"\s*:\s*\[', text)
    assert begin is not None
    events = text[begin.end() : text.rindex(b"]")]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.json"
        with path.open("wb") as file:
            file.write(text[: begin.end()])
            written = 0
            while written < LARGE_BYTES:
                file.write((b"," if written else b"") + events)
                written += len(events)
            file.write(b"]}")
        code = (
            "import sys\n"
            "from pathlib import Path\n"
            "from shardwise.observe.rank.classify import device_timeline\n"
            "from shardwise.observe.file.trace import read_trace\n"
            "from shardwise.step.breakdown import breakdown\n"
            "breakdown(device_timeline(read_trace(Path(sys.argv[1]))))\n"
            # Not getrusage: it includes the parent process.
            "status = Path('/proc/self/status').read_text()\n"
            "print(int(status.split('VmHWM:')[1].split()[0]) / 1024)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
        )
    return float(done.stdout)


def measure(rounds: int, python: str) -> dict[str, float | None]:
    ours(), floor()  # warm up byte code and file cache
    gc.disable()
    times: dict[str, list[float]] = {"ours": [], "floor": [], "hta": []}
    for _ in range(rounds):
        times["ours"].append(ours())
        times["floor"].append(floor())
        theirs = hta(python)
        if theirs is not None:
            times["hta"].append(theirs)
    pairs = list(zip(times["ours"], times["floor"], strict=True))
    return {
        "ours_s": statistics.median(times["ours"]),
        "floor_s": statistics.median(times["floor"]),
        "hta_s": statistics.median(times["hta"]) if times["hta"] else None,
        "vs_hta": statistics.median(h / o for h, o in zip(times["hta"], times["ours"], strict=True))
        if times["hta"]
        else None,
        "vs_floor": statistics.median(o / f for o, f in pairs),
        "rss_mb": large_rss_mb(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--hta", default=sys.executable, help="Python interpreter with traceinsight installed"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not TRACE.is_file():
        sys.exit("needs the traces in ../shared/traces")
    found = measure(options.rounds, options.hta)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    theirs = "not installed"
    if found["hta_s"]:
        theirs = f"{found['hta_s']:.2f} s ({found['vs_hta']:.1f} x Shardwise)"
    print(f"Shardwise {found['ours_s']:.3f} s ({found['vs_floor']:.2f} x floor); HTA {theirs}")
    print(f"peak memory for a trace of {LARGE_BYTES / 1e6:.0f} MB: {found['rss_mb']:.0f} MB")


if __name__ == "__main__":
    main()
