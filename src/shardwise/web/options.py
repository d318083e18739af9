"""Options that sentences name, as buttons that set the fields of the page's form."""

from __future__ import annotations

import re
from urllib.parse import urlencode

from shardwise.report.page.markup import element

# Fields that the value of an option fills, which a colon divides.
_VALUES = {"--adapter": ("adapter", "rank"), "--optimizer": ("optimizer",)}
_FLAGS = ("--compile", "--allow-low-precision-reduce")
_SHOWN = ("--global-batch",)
_YES = "yes"
_NAMED = re.compile(
    # At the beginning of a sentence stand several options, which only together make it fit.
    rf"(?<!>)(?P<option>{'|'.join(_VALUES)}) (?P<value>[a-z0-9-]+(:[0-9]+)?)"
    rf"|(?P<flag>{'|'.join(_FLAGS)})|(?P<shown>{'|'.join(_SHOWN)})"
    r"|(?P<other>--[a-z][a-z-]+)"
)


def with_buttons(html: str) -> str:
    """The same HTML, where options of `shardwise plan` are buttons.

    Those of `shardwise estimate` stay text, below or behind the name of that command.
    """
    return _NAMED.sub(_button, html)


def _button(named: re.Match[str]) -> str:
    if named["other"]:
        return str(element("span", named[0], class_="option"))
    if option := named["option"]:
        fields = dict(zip(_VALUES[option], named["value"].split(":"), strict=False))
    else:
        name = named["flag"] or named["shown"]
        fields = {name.removeprefix("--"): _YES if named["flag"] else ""}
    return str(element("button", named[0], type="button", class_="option",
                       data_fields=urlencode(fields)))  # fmt: skip
