"""The commands as typer describes them: usage, help, arguments, options, defaults, exit codes."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator
from importlib import import_module
from keyword import iskeyword
from typing import Any

import typer

from shardwise.cli.main import COMMANDS, GROUPS

_BRACKET = re.compile(r"^(.*?)\s*(?:\[([^\[\]]*)\])?$", re.DOTALL)
_CHOICES = re.compile(r"<([\w-]+(?:\|[\w-]+)+)>")
_TAKES = re.compile(r"<([^<>]+)>")
_KINDS = {
    "str": "TEXT",
    "path": "PATH",
    "int": "N",
    "int range": "N",
    "float range": "NUMBER",
    "float": "NUMBER",
    "list[str]": "TEXT",
    "list[Path]": "PATH",
}
# From a page of how-to.
_ANCHOR = "../reference/cli.md#shardwise-"
_EXIT = re.compile(r"Exits with .*?\.(?=\s|$)", re.DOTALL)


def commands_page() -> str:
    """Every command as a section of Markdown."""
    application = typer.Typer(name="shardwise")
    application.callback()(lambda: None)
    for name, function in written():
        application.command(name)(function)
    group: Any = typer.main.get_command(application)
    whole = typer.Context(group, info_name="shardwise")
    return "\n".join(_section(name, group.commands[name], whole) for name in group.commands)


def questions_table() -> str:
    """What each command answers, whether it prints JSON, and its exit codes."""
    answers = {name: told for group in GROUPS.values() for name, told in group.items()}
    rows = ["| command | answers | `--json` | exits with |", "|---|---|---|---|"]
    for name, function in written():
        exits = " ".join(" ".join(_EXIT.findall(inspect.getdoc(function) or "")).split())
        json = "yes" if "as_json" in inspect.signature(function).parameters else "no"
        codes = exits.removeprefix("Exits with ").rstrip(".") or "–"
        rows.append(f"| [`{name}`]({_ANCHOR}{name}) | {answers[name]} | {json} | {codes} |")
    return "\n".join(rows)


def written() -> Iterator[tuple[str, Any]]:
    """The commands and their functions; one whose module has no function yet is left out."""
    for name in COMMANDS:
        function = name.replace("-", "_") + "_" * iskeyword(name)
        found = getattr(import_module(f"shardwise.cli.{function}"), function, None)
        if found is None:
            logging.getLogger("mkdocs").info("shardwise %s is not written yet: left out", name)
        else:
            yield name, found


def _section(name: str, command: Any, whole: Any) -> str:
    context = typer.Context(command, info_name=name, parent=whole, max_content_width=1000)
    usage = " ".join([f"shardwise {name}", *command.collect_usage_pieces(context)])
    told = (command.help or "").replace("\f", "").strip()
    exits = " ".join(" ".join(_EXIT.findall(told)).split())
    parts = [f"## shardwise {name}", f"```text\n{usage}\n```", _EXIT.sub("", told).strip()]
    for kind, title in (("argument", "argument"), ("option", "option")):
        records = [
            parameter.get_help_record(context)
            for parameter in command.params
            if parameter.param_type_name == kind
        ]
        rows = [_row(*record) for record in records if record is not None]
        if rows:
            parts.append("\n".join([f"| {title} | meaning | default |", "|---|---|---|", *rows]))
    parts.append(f"**Exit code** {_codes(exits)}")
    return "\n\n".join(part for part in parts if part) + "\n"


def _row(names: str, told: str) -> str:
    text, extra = _BRACKET.match(told).groups()  # type: ignore[union-attr]
    facts = [fact.strip() for fact in (extra or "").split(";") if fact.strip()]
    default = next((f.removeprefix("default: ") for f in facts if f.startswith("default: ")), "")
    if "required" in facts:
        default = "required"
    elif default and not default.startswith("("):
        default = f"`{default}`"
    said = [_escaped(text)]
    choices = _CHOICES.search(names)
    if choices:
        said.append("One of " + ", ".join(f"`{one}`" for one in choices[1].split("|")) + ".")
    said += [_bound(fact) for fact in facts if "x" in fact and "=" in fact]
    return f"| `{_shown(names)}` | {' '.join(said)} | {default.strip('()')} |"


def _shown(names: str) -> str:
    """Names with what they take, in the words of this page."""
    return _TAKES.sub(
        lambda found: _KINDS.get(found[1], found[1].upper()), _CHOICES.sub("…", names)
    )


def _bound(fact: str) -> str:
    low, _, high = fact.replace("<", "").replace(">", "").partition("x")
    values = [part.replace("=", "").removesuffix(".0") for part in (low, high)]
    if ">" in fact:
        return f"At least {values[1]}."
    return f"From {values[0]} to {values[1]}." if values[0] else f"At most {values[1]}."


def _codes(exits: str) -> str:
    no = exits.removeprefix("Exits with ").rstrip(".")
    return f"0 done{'; ' + no if no else ''}; 2 bad input."


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
