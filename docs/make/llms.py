"""llms.txt: what each page answers and where to read it as Markdown, for language models.

The format is that of llmstxt.org: a title, a summary, and sections of links with a line each. The
sections are those of the navigation, the lines are the first sentences of the pages.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urljoin

from make.fields import find_record

_FRONT = re.compile(r"\A---\n.*?^---$", re.DOTALL | re.MULTILINE)
_NAME = re.compile(r"^::: (\S+)$", re.MULTILINE)
_FENCE = re.compile(r"^( *)```.*?^\1```[ ]*$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
# No sentence ends inside a number, a version or `code`.
_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*\[])")
# Headings, tables, lists, quotes, images, HTML, and directives of plugins.
_NO_PROSE = re.compile(r"\s*(#|\||[-*+] |\d+\. |>|!\[|!!!|<|:::)")


class Entry(NamedTuple):
    """A page of the navigation: the titles above it, its own, and its path."""

    section: str
    title: str
    path: str


def entries(nav: Any, above: tuple[str, ...] = ()) -> Iterator[Entry]:
    """The pages of a navigation in its order."""
    for item in nav:
        for title, inner in item.items():
            if isinstance(inner, str):
                yield Entry(": ".join(above) or "Overview", title, inner)
            else:
                yield from entries(inner, (*above, title))


def first_sentence(markdown: str) -> str:
    """The first sentence of prose, as plain text on one line; empty if there is none."""
    for paragraph in _FENCE.sub("", _FRONT.sub("", markdown)).split("\n\n"):
        text = " ".join(paragraph.split())
        if text and not _NO_PROSE.match(paragraph):
            return _LINK.sub(r"\1", _END.split(text)[0]).replace("**", "").rstrip(":")
    return ""


def llms_text(
    title: str,
    summary: str,
    nav: Any,
    read: Callable[[str], str],
    schemas: Mapping[str, str],
    site: str = "",
) -> str:
    """The text of llms.txt; `read` gives the Markdown of a page, `schemas` a line for each path.

    Links are absolute where the address of the site is known.
    """
    parts = [f"# {title}", f"> {summary}"]
    sections: dict[str, list[str]] = {}
    for entry in entries(nav):
        line = (
            f"{_link(entry.title, urljoin(site, entry.path))}: {first_sentence(read(entry.path))}"
        )
        sections.setdefault(entry.section, []).append(line)
    sections["Schemas"] = [
        f"{_link(path.rpartition('/')[2], urljoin(site, path))}: {told}"
        for path, told in schemas.items()
    ]
    for section, lines in sections.items():
        parts += [f"## {section}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def as_markdown(markdown: str) -> str:
    """A page without directives: a name of the code becomes its signature and its docstring."""
    return _NAME.sub(lambda found: _signature(find_record(found[1])), markdown)


def _signature(named: Any) -> str:
    head = f"### {named.__name__}\n\n```python\n{named.__name__}{inspect.signature(named)}\n```"
    return f"{head}\n\n{inspect.getdoc(named) or ''}".rstrip()


def _link(title: str, address: str) -> str:
    return f"- [{title}]({address})"
