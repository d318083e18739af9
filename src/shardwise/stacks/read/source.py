"""Calls and values of a Python script, read from its text. Nothing of it is executed."""

from __future__ import annotations

import ast
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from shardwise.spec.record import SpecError
from shardwise.stacks.outcomes import plain

# Deeper than anybody writes settings.
_DEPTH = 40


class Unknown(NamedTuple):
    """A value that is decided when the script runs."""

    source: str


# What several calls of the same function are given, each in its own way.
DIFFERS = Unknown("a value that differs from call to call")


class Symbol(NamedTuple):
    """A name that was imported or belongs to Python, such as `torch.bfloat16`."""

    path: str

    @property
    def last(self) -> str:
        return self.path.rpartition(".")[2]


class Call(NamedTuple):
    """A call with what it is given; `name` is the last part of what is called."""

    name: str
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    # Whether some keywords come from a dictionary that is only known at run time.
    more: bool = False
    # The full name of the function, such as torch.compile; "" if only known at run time.
    origin: str = ""

    def get(self, key: str, position: int | None = None) -> Any:
        """An argument by its name or place; None where it is not given."""
        if key in self.keywords:
            return self.keywords[key]
        if position is not None and position < len(self.args):
            return self.args[position]
        return None


# Statements that bind a name to a value known at run time only.
_CHANGES = (ast.AugAssign, ast.NamedExpr, ast.For, ast.AsyncFor, ast.comprehension)
_NUMBERS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
}


class Script:
    """The calls of a script, their arguments followed to where they are written down."""

    def __init__(self, text: str) -> None:
        try:
            self.tree = ast.parse(text)
        except SyntaxError as error:
            if "set_int_max_str_digits" in str(error):
                line = error.lineno or 1
                raise SpecError(
                    f"import: line {line} holds a number of thousands of digits"
                ) from None
            raise SpecError(
                f"import: line {error.lineno or 1} is not valid Python: {error.msg}"
            ) from None
        self._imports: dict[str, str] = {}
        self._bound: dict[str, list[ast.expr | None]] = {}
        self._calls: list[ast.Call] = []
        # Each name is followed once: `a = b + b`, `b = c + c` and so on would double the work.
        self._known: dict[str, Any] = {}
        for node in ast.walk(self.tree):
            self._learn(node)

    def _learn(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._bind(node.target, node.value)
        elif isinstance(node, _CHANGES):
            self._bind(node.target, None)
        elif isinstance(node, ast.arg):
            self._bound.setdefault(node.arg, []).append(None)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._bind(node.optional_vars, None)
        elif isinstance(node, ast.Call):
            self._calls.append(node)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for name in node.names:
            if isinstance(node, ast.ImportFrom):
                self._imports[name.asname or name.name] = f"{node.module or ''}.{name.name}"
            else:
                first = name.name.partition(".")[0]
                self._imports[name.asname or first] = name.name if name.asname else first

    def _bind(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Name):
            self._bound.setdefault(target.id, []).append(value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for part in target.elts:
                self._bind(part, None)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, None)

    def calls(self, *names: str) -> Iterator[Call]:
        """Every call of one of these, in the order in which they are written."""
        for node in sorted(self._calls, key=lambda call: (call.lineno, call.col_offset)):
            if self._name(node.func) in names:
                yield self._call(node, 0)

    def uses(self, *names: str) -> bool:
        return any(self._name(node.func) in names for node in self._calls)

    def called(self) -> Iterator[str]:
        """The names of all calls, without their modules."""
        return filter(None, (self._name(node.func) for node in self._calls))

    def number(self, *names: str) -> tuple[str, int] | None:
        """The first of these names that is bound to one whole number."""
        for name in names:
            if name in self._bound:
                value = self.value(ast.Name(id=name))
                if isinstance(value, int) and not isinstance(value, bool):
                    return name, value
        return None

    def _name(self, function: ast.expr) -> str:
        if isinstance(function, ast.Attribute):
            return function.attr
        if isinstance(function, ast.Name):
            return self._imports.get(function.id, function.id).rpartition(".")[2]
        return ""

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """A constant, a Symbol, a Call, a tuple, a dictionary, or Unknown."""
        readers: dict[type[ast.expr], Callable[[Any, int], Any]] = {
            ast.Constant: lambda constant, _: constant.value,
            ast.Name: self._named,
            ast.Attribute: self._attribute,
            ast.Call: self._call,
            ast.Tuple: self._parts,
            ast.List: self._parts,
            ast.Set: self._parts,
            ast.Dict: self._dictionary,
            ast.BinOp: self._arithmetic,
            ast.UnaryOp: self._negative,
        }
        read = readers.get(type(node))
        return _unknown(node) if read is None or depth > _DEPTH else read(node, depth)

    def _attribute(self, node: ast.Attribute, depth: int) -> Any:
        base = self.value(node.value, depth + 1)
        return Symbol(f"{base.path}.{node.attr}") if isinstance(base, Symbol) else _unknown(node)

    def _parts(self, node: ast.Tuple | ast.List | ast.Set, depth: int) -> tuple[Any, ...]:
        return tuple(self.value(part, depth + 1) for part in node.elts)

    def _named(self, node: ast.Name, depth: int) -> Any:
        if node.id not in self._known:
            # What it is while it is being looked up: a name that is made of itself.
            self._known[node.id] = _unknown(node)
            self._known[node.id] = self._followed(node, depth)
        return self._known[node.id]

    def _followed(self, node: ast.Name, depth: int) -> Any:
        values = self._bound.get(node.id, [])
        if not values:
            return Symbol(self._imports.get(node.id, node.id))
        written = {ast.dump(value) if value is not None else "" for value in values}
        # Bound twice, or by a loop or a caller: who knows to what.
        if len(written) > 1 or values[0] is None or node.id in self._imports:
            return _unknown(node)
        return self.value(values[0], depth + 1)

    def _call(self, node: ast.Call, depth: int) -> Call:
        keywords: dict[str, Any] = {}
        more = any(isinstance(argument, ast.Starred) for argument in node.args)
        for keyword in node.keywords:
            found = self.value(keyword.value, depth + 1)
            if keyword.arg is not None:
                keywords[keyword.arg] = found
            elif isinstance(found, dict):
                keywords |= found
            elif isinstance(found, Call) and found.name == "dict" and not found.args:
                keywords |= found.keywords
            else:
                more = True
        # After a starred argument, positions are unknown.
        placed = itertools.takewhile(lambda part: not isinstance(part, ast.Starred), node.args)
        args = tuple(self.value(argument, depth + 1) for argument in placed)
        called = self.value(node.func, depth + 1)
        origin = called.path if isinstance(called, Symbol) else ""
        return Call(self._name(node.func), args, keywords, more, origin)

    def _dictionary(self, node: ast.Dict, depth: int) -> Any:
        found: dict[str, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                return _unknown(node)
            found[key.value] = self.value(value, depth + 1)
        return found

    def _negative(self, node: ast.UnaryOp, depth: int) -> Any:
        value = self.value(node.operand, depth + 1)
        minus = isinstance(node.op, ast.USub) and _is_number(value)
        return -value if minus else _unknown(node)

    def _arithmetic(self, node: ast.BinOp, depth: int) -> Any:
        left, right = self.value(node.left, depth + 1), self.value(node.right, depth + 1)
        calculate = _NUMBERS.get(type(node.op))
        if calculate is None or not (_is_number(left) and _is_number(right)):
            return _unknown(node)
        try:
            result = calculate(left, right)
        except (ArithmeticError, ValueError):
            return _unknown(node)
        # Numbers that a script multiplies up for ever are no settings.
        return result if abs(result) < 2**63 else _unknown(node)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**63


def _unknown(node: ast.expr) -> Unknown:
    source = ast.unparse(node) if _shallow(node) else "an expression"
    return Unknown(source if len(source) <= 60 else f"{source[:57]}...")


def _shallow(node: ast.AST) -> bool:
    """Whether writing it back cannot exhaust the stack, or patience."""
    return sum(1 for _, _ in zip(ast.walk(node), range(60), strict=False)) < 60


def shown(value: object) -> str:
    """A value as a person reads it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Unknown):
        return value.source
    if isinstance(value, Symbol):
        return value.last
    if isinstance(value, Call):
        return f"{value.name}(...)"
    if isinstance(value, (tuple, dict)):
        return "an expression"
    return plain(value)[:60]


def why_not(value: object) -> str:
    """Why a value is not used: it is known at run time only, or Shardwise does not know it."""
    if value == DIFFERS:
        return "it differs from call to call"
    settled = isinstance(value, (bool, int, float, str, bytes)) or (
        isinstance(value, Symbol) and value.path.startswith("torch.")
    )
    ending = "is not a value that Shardwise knows" if settled else "is decided when the script runs"
    return f"{shown(value)} {ending}"
