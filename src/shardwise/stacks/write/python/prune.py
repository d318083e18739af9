"""Join modules of a program into one script that contains only the code that it runs."""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator
from typing import NamedTuple

from shardwise.stacks.write.python.imports import Import


class Module(NamedTuple):
    """The top-level statements of a module as text, by the names that they define."""

    definitions: dict[str, str]
    imports: dict[str, Import]
    # The `if __name__ == "__main__"` block.
    main: str


class Script(NamedTuple):
    """The definitions that a script needs, in order, with the imports and names that they use."""

    definitions: list[str]
    imports: set[Import]
    names: set[str]


def read_module(text: str, package: str) -> Module:
    """The statements of a module; imports from `package` itself are left out."""
    lines = text.splitlines()
    definitions: dict[str, str] = {}
    imports: dict[str, Import] = {}
    main = ""
    last = 0
    for statement in ast.parse(text).body:
        assert statement.end_lineno is not None
        # The text includes the comments and decorators above the statement.
        source = _tidy(lines[last : statement.end_lineno])
        last = statement.end_lineno
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            definitions[statement.name] = source
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            imports |= {one.bound: one for one in _imports(statement, package)}
        elif isinstance(statement, ast.If):
            main = source
    return Module(definitions, imports, main)


def _imports(statement: ast.Import | ast.ImportFrom, package: str) -> Iterator[Import]:
    """The imports of a statement, without those from `package` and `__future__`."""
    for name in statement.names:
        if isinstance(statement, ast.Import):
            yield Import(name.name, None, name.asname)
        elif not str(statement.module).startswith((package, "__future__")):
            yield Import(str(statement.module), name.name, name.asname)


def _tidy(lines: list[str]) -> str:
    """The lines as text with single blank lines, none at the start of a block or at the ends."""
    kept: list[str] = []
    for line in lines:
        if line.strip() or (kept and kept[-1].strip() and not kept[-1].endswith(":")):
            kept.append(line)
    return "\n".join(kept).strip("\n")


def prune(modules: list[Module]) -> Script:
    """The code that the last module runs, and every definition that this code needs."""
    definitions = {name: text for module in modules for name, text in module.definitions.items()}
    home = {name: module for module in modules for name in module.definitions}
    imports: set[Import] = set()
    names: set[str] = set()
    waiting = [(modules[-1].main, modules[-1])]
    while waiting:
        text, module = waiting.pop()
        used = global_names(text)
        imports |= {module.imports[name] for name in used & set(module.imports)}
        for name in used - names:
            names.add(name)
            if name in definitions:
                waiting.append((definitions[name], home[name]))
    needed = [text for name, text in definitions.items() if name in names]
    return Script([*needed, modules[-1].main], imports, names)


def global_names(text: str) -> set[str]:
    """The names of its module that a statement uses."""
    table, tree = symtable.symtable(text, "script", "exec"), ast.parse(text)
    return {*_used(table), *_annotations(tree)}


def _used(table: symtable.SymbolTable) -> Iterator[str]:
    """The global names that the code of a symbol table uses."""
    outermost = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (symbol.is_global() or outermost):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _used(child)


def _annotations(tree: ast.AST) -> Iterator[str]:
    """Names in annotations, which not every version of Python counts as used."""
    for node in ast.walk(tree):
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if annotation is not None:
                yield from (one.id for one in ast.walk(annotation) if isinstance(one, ast.Name))
