"""A run in the words of another stack, and what those words cannot say."""

from __future__ import annotations

from typing import NamedTuple


class Exported(NamedTuple):
    """One file of another stack."""

    # Its usual name, such as accelerate.yaml.
    name: str
    text: str
    # Sentences: each a setting of the run that this stack has no word for, and what happens there.
    losses: tuple[str, ...]
    # The command that starts it, where the file lies in the current folder.
    command: str
