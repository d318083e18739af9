"""Generate a script from the program in `stacks/program` with the settings of a run."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from shardwise.spec.foreign_text import visible
from shardwise.stacks.write.python.constants import constant, written
from shardwise.stacks.write.python.fold import fold
from shardwise.stacks.write.python.imports import Import, import_lines
from shardwise.stacks.write.python.prune import Script, global_names, prune, read_module
from shardwise.stacks.write.python.settings import Constants

_PROGRAM = Path(__file__).parents[2] / "program"
_PACKAGE = "shardwise.stacks.program"
# Modules of the program that the run's own settings and code replace.
_REPLACED = ("settings", "own_code")
# Imports that constants and choices may need, besides the user's own code.
_NAMED = (Import("torch"), Import("torch", "nn"), Import("pathlib", "Path"))


class Settings(NamedTuple):
    """What a run sets in the program."""

    # Constants by the title of their group; those that the script uses are at its top.
    constants: Constants
    # Settings that select the code; their values are written where they are used.
    choices: Mapping[str, object]
    # Imports of the user's own modules.
    imports: tuple[Import, ...] = ()


def write_script(description: str, program: str, settings: Settings) -> str:
    """The module `program` and its imports as one script that contains only what the settings need.

    `description` becomes the docstring.
    """
    shown = {name: value for group in settings.constants.values() for name, value in group.items()}
    inlined = {name: written(value) for name, value in settings.choices.items()}
    known = {**shown, **settings.choices}
    texts = [fold(text, known, inlined) for text in program_texts(program)]
    return _assemble(description, prune([read_module(text, _PACKAGE) for text in texts]), settings)


def write_whole_program(description: str, program: str, settings: Settings) -> str:
    """The module `program` and its imports as one script with every branch.

    All settings are constants at its top.
    """
    modules = [read_module(text, _PACKAGE) for text in program_texts(program)]
    everything = {**settings.constants, "Choices.": settings.choices}
    return _assemble(description, prune(modules), settings._replace(constants=everything))


@cache
def program_texts(program: str) -> tuple[str, ...]:
    """The texts of the modules of a program, each after the modules that it imports."""
    text = (_PROGRAM / f"{program}.py").read_text(encoding="utf-8")
    found: dict[str, None] = {}
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.ImportFrom) and statement.module:
            package, _, name = statement.module.rpartition(".")
            if package == _PACKAGE and name not in _REPLACED:
                found |= dict.fromkeys(program_texts(name))
    return (*found, text)


def _assemble(description: str, script: Script, settings: Settings) -> str:
    """The text of a script: docstring, imports, constants, definitions."""
    groups = {
        title: [constant(name, value) for name, value in group.items() if name in script.names]
        for title, group in settings.constants.items()
    }
    constants = "\n\n".join(
        "\n".join([f"# {title}", *group]) for title, group in groups.items() if group
    )
    names = script.names | global_names(constants)
    imports = {one for one in (*_NAMED, *settings.imports) if one.bound in names}
    head = [_docstring(description), import_lines({*script.imports, *imports}), constants]
    return "\n\n\n".join(["\n\n".join(head), *script.definitions]) + "\n"


def _docstring(text: str) -> str:
    """The text as a docstring, with its quotes and backslashes escaped."""
    return '"""' + visible(text).replace("\\", "\\\\").replace('"', '\\"') + '\n"""'
