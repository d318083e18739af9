"""Text that others wrote, made safe to show: file names, traces, run records, other tools' files.

A terminal obeys escape sequences, bidirectional marks reorder what is read, a spreadsheet computes
cells that begin with `=`, and a line break ends a comment. Screens, messages, CSV, HTML and
generated files pass such text through here, where it is written.
"""

from __future__ import annotations

import unicodedata

# In place of a character that is not shown: one column wide, as the character is counted.
HIDDEN = "\N{REPLACEMENT CHARACTER}"


def visible(text: str) -> str:
    """The text with `HIDDEN` for every control, bidirectional or unassigned character.

    Line feeds, tabs and spaces of other widths stay.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or _is_space(one) else HIDDEN for one in text)


def one_line(text: str) -> str:
    """`visible` text on one line: the rest of a comment, a sentence, a cell."""
    return visible(text).replace("\n", " ").replace("\t", " ")


def _is_space(character: str) -> bool:
    return character in "\n\t" or unicodedata.category(character) == "Zs"
