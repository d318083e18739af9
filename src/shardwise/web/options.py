"""Options named in sentences, as buttons that set fields of the page's form."""

from __future__ import annotations

import re
from urllib.parse import urlencode

from shardwise.report.page.markup import element

# Fields of the form by option; a colon separates the values for several fields.
VALUES = {
    "--adapter": ("adapter", "rank"),
    "--optimizer": ("optimizer",),
    "--states": ("states",),
}
FLAGS = (
    "--compile",
    "--allow-low-precision-reduce",
    "--offload-optimizer",
    "--offload-activations",
    "--offload",
)
SHOWN = ("--global-batch",)
_YES = "yes"
_NAMED = re.compile(
    # Options at the start of a sentence belong together: only all of them make the run fit.
    rf"(?<!>)(?P<option>{'|'.join(VALUES)}) (?P<value>[a-z0-9+-]+(:[0-9]+)?)"
    rf"|(?P<flag>{'|'.join(FLAGS)})|(?P<shown>{'|'.join(SHOWN)})"
    r"|(?P<other>--[a-z][a-z-]+)"
)


def with_buttons(html: str) -> str:
    """The HTML with options that the form has as buttons; other options become marked text."""
    return _NAMED.sub(_button, html)


def _button(named: re.Match[str]) -> str:
    """The button of one option; options that the form lacks become marked text."""
    if named["other"]:
        return str(element("span", named[0], class_="option"))
    if option := named["option"]:
        fields = dict(zip(VALUES[option], named["value"].split(":"), strict=False))
    else:
        name = named["flag"] or named["shown"]
        fields = {name.removeprefix("--"): _YES if named["flag"] else ""}
    return str(element("button", named[0], type="button", class_="option",
                       data_fields=urlencode(fields)))  # fmt: skip
