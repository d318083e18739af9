"""Text that others wrote, made safe to show: file names, traces, run records, other tools' files.

A terminal obeys escape sequences, bidirectional marks reorder what is read, a spreadsheet computes
cells that begin with `=`, and a line break ends a comment. Screens, messages, CSV, HTML and
generated files pass such text through here, where it is written.
"""

from __future__ import annotations

import sys
import unicodedata

# In place of a character that is not shown: one column wide, as the character is counted.
HIDDEN = "\N{REPLACEMENT CHARACTER}"
# Categories of Unicode: control, format, surrogate, and the separators of lines and paragraphs.
_OBEYED = ("Cc", "Cf", "Cs", "Zl", "Zp")
# How spreadsheets recognise a formula.
_FORMULA = ("=", "+", "-", "@")


def visible(text: str) -> str:
    """The text with `HIDDEN` for control, format and bidirectional characters and half surrogates.

    Line feeds and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(HIDDEN if _is_obeyed(one) else one for one in text)


def one_line(text: str) -> str:
    """`visible` text on one line: the rest of a comment, a sentence, a cell."""
    return visible(text).replace("\n", " ").replace("\t", " ")


def cut(text: str, limit: int) -> str:
    """`one_line` of at most `limit` characters; an ellipsis stands for the rest."""
    return one_line(text if len(text) <= limit else f"{text[: limit - 1]}…")


def csv_cell(text: str) -> str:
    """A cell that no spreadsheet computes: an apostrophe goes before what would be a formula."""
    line = one_line(text)
    return f"'{line}" if line.lstrip().startswith(_FORMULA) else line


def echo(text: str = "", *, err: bool = False, end: str = "\n") -> None:
    """Print `visible` text: every message of a command that is no rich screen."""
    print(visible(text), end=end, file=sys.stderr if err else sys.stdout, flush=True)


def echo_traceback(error: BaseException) -> None:
    """Print the traceback of an error, whose message may quote a file of others."""
    import traceback

    echo("".join(traceback.format_exception(error)), err=True, end="")


def _is_obeyed(character: str) -> bool:
    return character not in "\n\t" and unicodedata.category(character) in _OBEYED
