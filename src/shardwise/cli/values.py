"""Values of options that are a number, a word or a flag."""

from __future__ import annotations


def lowercase(text: str | None) -> str | None:
    return None if text is None else text.lower()


def number_or_word(text: str | None) -> object:
    """A number such as 0.5, a percentage as a share, or a word in lower case; None for None."""
    try:
        if text is not None and text.endswith("%"):
            return float(text[:-1]) / 100
        return None if text is None else float(text)
    except ValueError:
        return lowercase(text)


def flag_or_size(text: str | None) -> object:
    """A bool for "true" and "false", an int for digits; any other text and None unchanged."""
    if text is None or not text.isdigit():
        return {"true": True, "false": False}.get((text or "").lower(), text)
    return int(text)
