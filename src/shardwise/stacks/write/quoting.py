"""Text from a run inside files of other languages: it stays text, whatever it says."""

from __future__ import annotations

import re


def slug(text: str, longest: int = 40) -> str:
    """Lower-case letters, digits and hyphens: a name that every scheduler takes."""
    found = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:longest].rstrip("-")
    # Kubernetes wants a letter first in the names of services.
    return found if found[:1].isalpha() else f"run-{found}".rstrip("-")


def yaml_text(text: str) -> str:
    """A double-quoted scalar of YAML on one line."""
    return f'"{"".join(_escaped(character) for character in text)}"'


def yaml_block(text: str, indent: int) -> str:
    """Lines as they are, under `|`, where YAML allows that; else one quoted line."""
    lines = text.split("\n")
    plain = all(line.isprintable() for line in lines) and not text.startswith((" ", "\n"))
    if not plain or not text.endswith("\n") or text.endswith("\n\n"):
        return yaml_text(text)
    # A line of spaces would be read as indentation.
    return "|\n" + "\n".join(" " * indent + line if line else "" for line in lines[:-1])


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if character.isprintable():
        return character
    code = ord(character)
    return (
        f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
    )
