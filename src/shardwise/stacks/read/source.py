"""Calls and values of a Python script, read from its syntax tree. Nothing is executed."""

from __future__ import annotations

import ast
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from shardwise.spec.record import SpecError
from shardwise.stacks.outcomes import plain_text

# Maximum nesting of expressions that are followed; real settings are not nested deeper.
_DEPTH = 40


class Unknown(NamedTuple):
    """A value that is known only at run time, with its expression as text."""

    source: str


# An argument that has another value in each of several calls of a function.
DIFFERS = Unknown("a value that differs from call to call")


class Symbol(NamedTuple):
    """An imported or built-in name, such as `torch.bfloat16`."""

    path: str

    @property
    def last(self) -> str:
        """The last part of the path, such as `bfloat16`."""
        return self.path.rpartition(".")[2]


class Call(NamedTuple):
    """A call with its arguments as values; `name` is the last part of the function's name."""

    name: str
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    # Whether some keywords come from a dictionary that is only known at run time.
    more: bool = False
    # The full name of the function, such as torch.compile; "" if only known at run time.
    origin: str = ""

    def get(self, key: str, position: int | None = None) -> Any:
        """An argument by its name or position; None if it is not given."""
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
    """The calls of a script; names in their arguments are followed to the assigned values."""

    def __init__(self, text: str) -> None:
        """Parse the text of a script.

        Raises:
            SpecError: The text is not valid Python.
        """
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
        # Values of names that were already followed: without it, `a = b + b`, `b = c + c` and so
        # on double the work each time.
        self._known: dict[str, Any] = {}
        for node in ast.walk(self.tree):
            self._learn(node)

    def _learn(self, node: ast.AST) -> None:
        """Record the imports, the assigned names and the calls of one node."""
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
        """Record the full name of each imported name."""
        for name in node.names:
            if isinstance(node, ast.ImportFrom):
                self._imports[name.asname or name.name] = f"{node.module or ''}.{name.name}"
            else:
                first = name.name.partition(".")[0]
                self._imports[name.asname or first] = name.name if name.asname else first

    def _bind(self, target: ast.expr, value: ast.expr | None) -> None:
        """Record that a name is assigned an expression; None: a value known at run time only."""
        if isinstance(target, ast.Name):
            self._bound.setdefault(target.id, []).append(value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for part in target.elts:
                self._bind(part, None)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, None)

    def calls(self, *names: str) -> Iterator[Call]:
        """Every call of a function with one of these names, in the order of the text."""
        for node in sorted(self._calls, key=lambda call: (call.lineno, call.col_offset)):
            if self._name(node.func) in names:
                yield self._call(node, 0)

    def uses(self, *names: str) -> bool:
        """Whether the script calls a function with one of these names."""
        return any(self._name(node.func) in names for node in self._calls)

    def called(self) -> Iterator[str]:
        """The names of all called functions, without their modules."""
        return filter(None, (self._name(node.func) for node in self._calls))

    def number(self, *names: str) -> tuple[str, int] | None:
        """(name, value) of the first of these names that holds one integer; None if none does."""
        for name in names:
            if name in self._bound:
                value = self.value(ast.Name(id=name))
                if isinstance(value, int) and not isinstance(value, bool):
                    return name, value
        return None

    def _name(self, function: ast.expr) -> str:
        """The last part of a called function's name; "" if it has none."""
        if isinstance(function, ast.Attribute):
            return function.attr
        if isinstance(function, ast.Name):
            return self._imports.get(function.id, function.id).rpartition(".")[2]
        return ""

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """The value of an expression: a constant, Symbol, Call, tuple, dictionary or Unknown."""
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
        """The attribute of an imported or built-in name as a Symbol; Unknown for other objects."""
        base = self.value(node.value, depth + 1)
        return Symbol(f"{base.path}.{node.attr}") if isinstance(base, Symbol) else _unknown(node)

    def _parts(self, node: ast.Tuple | ast.List | ast.Set, depth: int) -> tuple[Any, ...]:
        return tuple(self.value(part, depth + 1) for part in node.elts)

    def _named(self, node: ast.Name, depth: int) -> Any:
        """The value of a name, from a cache."""
        if node.id not in self._known:
            # The value during the lookup, for a name that is defined in terms of itself.
            self._known[node.id] = _unknown(node)
            self._known[node.id] = self._followed(node, depth)
        return self._known[node.id]

    def _followed(self, node: ast.Name, depth: int) -> Any:
        """The value assigned to a name; Unknown if ambiguous, a Symbol if never assigned."""
        values = self._bound.get(node.id, [])
        if not values:
            return Symbol(self._imports.get(node.id, node.id))
        written = {ast.dump(value) if value is not None else "" for value in values}
        # Assigned twice, or by a loop or a caller: the value is known only at run time.
        if len(written) > 1 or values[0] is None or node.id in self._imports:
            return _unknown(node)
        return self.value(values[0], depth + 1)

    def _call(self, node: ast.Call, depth: int) -> Call:
        """A call with its arguments; `**` of a known dictionary is merged into the keywords."""
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
        """A dictionary with text keys; Unknown if a key is not a text."""
        found: dict[str, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                return _unknown(node)
            found[key.value] = self.value(value, depth + 1)
        return found

    def _negative(self, node: ast.UnaryOp, depth: int) -> Any:
        """The negative of a number; Unknown for other unary operations."""
        value = self.value(node.operand, depth + 1)
        minus = isinstance(node.op, ast.USub) and _is_number(value)
        return -value if minus else _unknown(node)

    def _arithmetic(self, node: ast.BinOp, depth: int) -> Any:
        """The result of arithmetic on two numbers; Unknown for anything else."""
        left, right = self.value(node.left, depth + 1), self.value(node.right, depth + 1)
        calculate = _NUMBERS.get(type(node.op))
        if calculate is None or not (_is_number(left) and _is_number(right)):
            return _unknown(node)
        try:
            result = calculate(left, right)
        except (ArithmeticError, ValueError):
            return _unknown(node)
        # Settings are never this large; repeated products could grow without limit.
        return result if abs(result) < 2**63 else _unknown(node)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**63


def _unknown(node: ast.expr) -> Unknown:
    """The expression as an Unknown, with its text cut to 60 characters."""
    source = ast.unparse(node) if _shallow(node) else "an expression"
    return Unknown(source if len(source) <= 60 else f"{source[:57]}...")


def _shallow(node: ast.AST) -> bool:
    """Whether the node has fewer than 60 nodes, so that turning it back into text is cheap."""
    return sum(1 for _, _ in zip(ast.walk(node), range(60), strict=False)) < 60


def script_value_text(value: object) -> str:
    """A value of a script as text for a sentence, cut to 60 characters."""
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
    return plain_text(value)[:60]


def unused_reason(value: object) -> str:
    """The reason why a value is not used: known only at run time, or not supported by Shardwise."""
    if value == DIFFERS:
        return "it differs from call to call"
    settled = isinstance(value, (bool, int, float, str, bytes)) or (
        isinstance(value, Symbol) and value.path.startswith("torch.")
    )
    ending = "is not a value that Shardwise knows" if settled else "is decided when the script runs"
    return f"{script_value_text(value)} {ending}"
