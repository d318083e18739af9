"""Quote text from a run for other languages, so that it always stays text."""

from __future__ import annotations

import re


def slug(text: str, longest: int = 40) -> str:
    """The text as lower-case letters, digits and hyphens, a name that every scheduler accepts."""
    found = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:longest].rstrip("-")
    # Names of Kubernetes services must begin with a letter.
    return found if found[:1].isalpha() else f"run-{found}".rstrip("-")


def yaml_text(text: str) -> str:
    """The text as a double-quoted YAML scalar on one line."""
    return f'"{"".join(_escaped(character) for character in text)}"'


def yaml_block(text: str, indent: int) -> str:
    """The text as a YAML block under `|`, indented by `indent` spaces.

    If YAML cannot represent it so, a double-quoted scalar on one line.
    """
    lines = text.split("\n")
    plain = all(line.isprintable() for line in lines) and not text.startswith((" ", "\n"))
    if not plain or not text.endswith("\n") or text.endswith("\n\n"):
        return yaml_text(text)
    # A line of spaces would be read as indentation.
    return "|\n" + "\n".join(" " * indent + line if line else "" for line in lines[:-1])


def _escaped(character: str) -> str:
    """A character inside a double-quoted YAML scalar."""
    if character in '"\\':
        return f"\\{character}"
    if character.isprintable():
        return character
    code = ord(character)
    return (
        f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
    )
