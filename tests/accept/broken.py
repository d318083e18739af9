"""Functions for ranks that fail in every way in which a check can."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwise.trials.accept.ranks import TASK


def _leads() -> bool:
    return os.environ["RANK"] == "0"


def counts(case: Mapping[str, Any]) -> Iterator[int]:
    yield from range(case["values"])


def raises(_: Mapping[str, Any]) -> Iterator[int]:
    yield 1
    raise RuntimeError("broken on purpose")


def dies(_: Mapping[str, Any]) -> Iterator[int]:
    """Rank 1 is killed, as by a driver or by the kernel; rank 0 would wait for it forever."""
    yield 1
    if not _leads():
        # Not before rank 0 has said its value: it ends with rank 1.
        values = Path(json.loads(Path(os.environ[TASK]).read_text())["values"])
        while not values.stat().st_size:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)


def hangs(_: Mapping[str, Any]) -> Iterator[int]:
    yield 1
    time.sleep(3600)
