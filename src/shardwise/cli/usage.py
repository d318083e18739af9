"""Usage errors of the command line as one plain sentence each."""

from __future__ import annotations

from typing import Any

import typer
from pydantic import ValidationError

from shardwise.spec.suggest import did_you_mean
from shardwise.spec.wording import value_sentence

# Typer brings its own copy of click, or uses the installed one; both are reached through it.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def usage_problem(error: Any) -> str:
    """Sentence: what to change on the command line, for a UsageError of click."""
    kind, message = type(error).__name__, str(getattr(error, "message", "")).rstrip(".")
    name = _parameter(error)
    if kind == "MissingParameter":
        return f"{name}: is required; see --help"
    if kind == "NoSuchOption":
        given = str(error.option_name)
        return f"there is no option {given}{did_you_mean(given, _options(error)) or '; see --help'}"
    if kind == "NoSuchCommand" or message.startswith("No such command"):
        given = message.partition("'")[2].partition("'")[0]
        hint = did_you_mean(given, _commands(error)) or "; see shardwise --help"
        return f"there is no command {given!r}{hint}"
    if kind == "BadParameter":
        cause = error.__cause__
        said = value_sentence(cause) if isinstance(cause, ValidationError) else _range(error)
        return f"{name}: {said or message}"
    return f"{message[:1].lower()}{message[1:]}; see --help"


def _parameter(error: Any) -> str:
    """The name of the option or argument that an error is about."""
    parameter = getattr(error, "param", None)
    names = [name for name in getattr(parameter, "opts", ()) if name.startswith("--")]
    if names:
        return str(names[0])
    return str(getattr(parameter, "name", None) or "argument").rstrip("_").upper()


def _range(error: Any) -> str:
    """Phrase: the allowed range of a number, if click rejected it as outside; else empty."""
    kind = getattr(getattr(error, "param", None), "type", None)
    low, high = getattr(kind, "min", None), getattr(kind, "max", None)
    if "is not in the range" not in str(error.message) or (low is None and high is None):
        return ""
    given = str(error.message).partition(" ")[0]
    if low is not None and high is not None:
        return f"must be from {low:g} to {high:g}, not {given}"
    bound = f"at least {low:g}" if low is not None else f"at most {high:g}"
    return f"must be {bound}, not {given}"


def _options(error: Any) -> list[str]:
    """All options of the command that an error is about."""
    command = getattr(getattr(error, "ctx", None), "command", None)
    return [name for param in getattr(command, "params", ()) for name in param.opts]


def _commands(error: Any) -> list[str]:
    """Names of all commands of the group that an error is about."""
    command = getattr(getattr(error, "ctx", None), "command", None)
    return list(getattr(command, "commands", {}))
