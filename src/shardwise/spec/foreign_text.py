"""Make untrusted text safe to show: file names, traces, run records, other tools' files.

A terminal obeys escape sequences, bidirectional marks reorder text, a spreadsheet computes cells
that begin with `=`, and a line break ends a comment. Screens, messages, CSV, HTML and generated
files pass such text through these functions when they write it.
"""

from __future__ import annotations

import sys
import unicodedata

# Replaces a character that is not shown; one column wide, as the character is counted.
HIDDEN = "\N{REPLACEMENT CHARACTER}"
# Categories of Unicode: control, format, surrogate, and the separators of lines and paragraphs.
_CONTROL_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
# How spreadsheets recognise a formula.
_FORMULA = ("=", "+", "-", "@")


def visible(text: str) -> str:
    """The text with control, format and bidirectional characters and surrogates as `HIDDEN`.

    Line feeds and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(HIDDEN if _is_control(one) else one for one in text)


def one_line(text: str) -> str:
    """The `visible` text on one line: line feeds and tabs become spaces."""
    return visible(text).replace("\n", " ").replace("\t", " ")


def cut(text: str, limit: int) -> str:
    """The text on one line, cut to `limit` characters with an ellipsis at the end."""
    return one_line(text if len(text) <= limit else f"{text[: limit - 1]}…")


def csv_cell(text: str) -> str:
    """The text as a CSV cell; an apostrophe is put before a text that would be a formula."""
    line = one_line(text)
    return f"'{line}" if line.lstrip().startswith(_FORMULA) else line


def echo(text: str = "", *, err: bool = False, end: str = "\n") -> None:
    """Print `visible` text to stdout, or with `err` to stderr."""
    print(visible(text), end=end, file=sys.stderr if err else sys.stdout, flush=True)


def echo_traceback(error: BaseException) -> None:
    """Print the traceback of an error to stderr; its message may quote untrusted text."""
    import traceback

    echo("".join(traceback.format_exception(error)), err=True, end="")


def _is_control(character: str) -> bool:
    """Whether a terminal may interpret a character instead of showing it."""
    return character not in "\n\t" and unicodedata.category(character) in _CONTROL_CATEGORIES
