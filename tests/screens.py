"""Golden files: what a screen shows, one file per screen in `tests/golden/`.

Tests assert the structured result; the words of a screen are pinned here and nowhere else, so that
an edit touches one file. `pytest --update-golden` writes the files anew; read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"
UPDATE = "SHARDWISE_UPDATE_GOLDEN"


def assert_screen(name: str, printed: str) -> None:
    """The text a command printed at 80 columns is the one in `tests/golden/{name}.txt`."""
    path = FOLDER / f"{name}.txt"
    text = "\n".join(line.rstrip() for line in printed.strip("\n").splitlines()) + "\n"
    if os.environ.get(UPDATE):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"{path.name} is missing: pytest --update-golden writes it"
    assert text == path.read_text(), f"pytest --update-golden writes {path.name} anew"
