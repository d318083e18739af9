"""Text from a file that is not trusted, made fit for a screen."""

from __future__ import annotations


def printable(text: str, most: int = 2000) -> str:
    """At most `most` characters; what would move the cursor or cannot be encoded is a '?'."""
    cut = text if len(text) <= most else text[: most - 1] + "…"
    return cut if cut.isprintable() else "".join(c if c.isprintable() else "?" for c in cut)
