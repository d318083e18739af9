"""Make text from untrusted files safe to print."""

from __future__ import annotations


def printable(text: str, limit: int = 2000) -> str:
    """Text of at most `limit` characters; control and unencodable characters become '?'."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return cut if cut.isprintable() else "".join(c if c.isprintable() else "?" for c in cut)
