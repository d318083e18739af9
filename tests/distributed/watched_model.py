"""The model of the fault matrix, in ranks that note whatever they unpickle from then on."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.faults.plant import plain as small

# The folder in which a rank notes what it unpickles, and that it watches.
FOLDER = "SHARDWISE_TEST_UNPICKLED"


def plain() -> nn.Module:
    """The model; ranks have begun to exchange what they need when it is built."""
    if "RANK" in os.environ:
        notes = Path(os.environ[FOLDER], f"rank-{os.environ['RANK']}")
        notes.touch()

        def note(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "pickle.find_class":
                with notes.open("a") as file:
                    file.write(f"{arguments}\n{''.join(traceback.format_stack(limit=12))}")

        sys.addaudithook(note)
    return small()
