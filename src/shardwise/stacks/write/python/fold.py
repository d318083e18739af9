"""Cut from a program's text the code that known settings rule out.

Branches of `if`, conditional expressions, operands of `and` and `or`, contexts that are
`nullcontext()`, and spread literals such as `**({"a": b} if SETTING else {})` are resolved if they
depend on settings only. Everything else, comments too, stays as it is: text is only cut.
"""

from __future__ import annotations

import ast
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

# Stands for the value of an expression that does not depend on settings only.
_OPEN: Any = object()
_INDENT = 4


def fold(text: str, settings: Mapping[str, object], inlined: Mapping[str, str]) -> str:
    """The text without the code that `settings` rule out; names in `inlined` become expressions."""
    folder = _Folder(text, settings, inlined)
    folder.block(_parsed(text).body)
    return folder.result()


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


class _Folder:
    """Marks the parts of one text to cut, insert and dedent, then writes the result."""

    def __init__(
        self, text: str, settings: Mapping[str, object], inlined: Mapping[str, str]
    ) -> None:
        self._text, self._settings, self._inlined = text, settings, inlined
        self._lines = text.splitlines(keepends=True)
        self._offsets = [0, *accumulate(map(len, self._lines))]
        self._is_cut = bytearray(len(text))
        self._edited: set[int] = set()
        self._inserted: dict[int, str] = {}
        # Columns by which each line is dedented.
        self._moves = [0] * len(self._lines)

    def result(self) -> str:
        """The text with all cuts, insertions and dedents applied."""
        written: list[str] = []
        for number, line in enumerate(self._lines):
            start = self._offsets[number]
            if number in self._edited:
                kept = "".join(
                    self._inserted.get(at, "") + ("" if self._is_cut[at] else character)
                    for at, character in enumerate(line, start)
                )
            else:
                kept = line
            written.append(kept.removeprefix(" " * self._moves[number]))
        return "".join(written)

    # ---- places in the text ----------------------------------------------------------------------

    def _start(self, node: ast.expr | ast.stmt) -> int:
        """The offset in the text, in characters, at which a node begins.

        `col_offset` counts UTF-8 bytes: this is exact if only ASCII precedes the node in its line.
        """
        return self._offsets[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        """The offset in the text, in characters, after a node; exact as in `_start`."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offsets[node.end_lineno - 1] + node.end_col_offset

    def _cut(self, start: int, end: int, instead: str = "") -> None:
        """Cut the text between two offsets, and insert `instead`."""
        self._is_cut[start:end] = b"\1" * (end - start)
        self._edited.update(range(self._line_at(start) - 1, self._line_at(end)))
        if instead:
            self._inserted[start] = instead

    def _cut_lines(self, first: int, last: int) -> None:
        """Cut the lines from `first` to `last`, both included and counted from 1."""
        if first <= last:
            self._cut(self._offsets[first - 1], self._offsets[last])

    def _move(self, first: int, last: int, columns: int) -> None:
        """Dedent the lines from `first` to `last` by `columns`."""
        for number in range(first - 1, last):
            self._moves[number] += columns

    def _line(self, number: int) -> str:
        """The line with this number, counted from 1, without indentation."""
        return self._lines[number - 1].strip()

    def _is_elif(self, statements: Sequence[ast.stmt]) -> bool:
        """Whether the `else` branch of an `if` is an `elif`."""
        return self._text.startswith("elif", self._start(statements[0]))

    # ---- statements ------------------------------------------------------------------------------

    def block(self, statements: Sequence[ast.stmt]) -> bool:
        """Fold a block; return whether it always leaves the function or the loop.

        Statements after the one that leaves are cut.
        """
        for index, statement in enumerate(statements):
            if self._statement(statement):
                for dead in statements[index + 1 :]:
                    self._cut_statement(dead)
                return True
        return False

    def _statement(self, statement: ast.stmt) -> bool:
        """Fold a statement; return whether it always leaves the function or the loop."""
        if isinstance(statement, ast.If):
            return self._if(statement)
        if isinstance(statement, ast.With) and self._is_null(statement.items[0].context_expr):
            header = self._header(statement.items[0].context_expr)
            self._cut_lines(self._with_comment(statement), header)
            self._keep(statement, header + 1, _last(statement))
            return self.block(statement.body)
        for _, value in ast.iter_fields(statement):
            parts = value if isinstance(value, list) else [value]
            if parts and isinstance(parts[0], ast.stmt):
                self.block(parts)
            else:
                for part in parts:
                    if isinstance(part, ast.AST):
                        self._expression(part)
        return isinstance(statement, (ast.Return, ast.Raise, ast.Continue))

    def _if(self, statement: ast.If) -> bool:
        """Fold an `if`; return whether it always leaves the function or the loop."""
        test, other = self._value(statement.test), statement.orelse
        if test is _OPEN:
            self._expression(statement.test)
            ends = self.block(statement.body)
            if other and self._is_elif(other):
                return self._elif(other[0]) and ends
            return bool(other) and self.block(other) and ends
        header = self._header(statement.test)
        if test:
            end = self._else(statement) - 1 if other else _last(statement)
            self._keep(statement, header + 1, end)
            return self.block(statement.body)
        if not other:
            self._cut_statement(statement)
            return False
        if self._is_elif(other):
            # The chain now begins with this `elif`.
            self._cut_lines(statement.lineno, other[0].lineno - 1)
            self._cut(self._start(other[0]), self._start(other[0]) + len("el"))
            return self.block(other)
        self._keep(statement, self._else(statement) + 1, _last(statement))
        return self.block(other)

    def _elif(self, statement: ast.stmt) -> bool:
        """Fold an `elif` after a test that stays; the result is that of `_if`."""
        assert isinstance(statement, ast.If)
        test, other = self._value(statement.test), statement.orelse
        if test is _OPEN:
            return self._if(statement)
        header = self._header(statement.test)
        if test:
            self._cut(self._start(statement), self._offsets[header] - 1, "else:")
            if other:
                self._cut_lines(_last(statement.body[-1]) + 1, _last(statement))
            return self.block(statement.body)
        if not other:
            self._cut_lines(statement.lineno, _last(statement))
            return False
        if self._is_elif(other):
            self._cut_lines(statement.lineno, other[0].lineno - 1)
            return self._elif(other[0])
        self._cut_lines(statement.lineno, self._else(statement) - 1)
        return self.block(other)

    def _header(self, last: ast.expr) -> int:
        """The number of the line with the colon that ends the header of a block."""
        number = last.end_lineno or 0
        while not self._line(number).partition("  #")[0].endswith(":"):
            number += 1
        return number

    def _else(self, statement: ast.If) -> int:
        """The number of the line with the `else:` or `elif` of an `if`."""
        if self._is_elif(statement.orelse):
            return statement.orelse[0].lineno
        number = _last(statement.body[-1]) + 1
        while self._line(number) != "else:":
            number += 1
        return number

    def _keep(self, statement: ast.stmt, first: int, last: int) -> None:
        """Replace a compound statement by its lines from `first` to `last`, dedented."""
        self._cut_lines(statement.lineno, first - 1)
        self._cut_lines(last + 1, _last(statement))
        self._move(first, last, _INDENT)

    def _cut_statement(self, statement: ast.stmt) -> None:
        """Cut a statement and the comment directly above it."""
        self._cut_lines(self._with_comment(statement), _last(statement))

    def _with_comment(self, statement: ast.stmt) -> int:
        """The number of the first line of the comment directly above a statement."""
        first = statement.lineno
        while self._line(first - 1).startswith("#"):
            first -= 1
        return first

    def _is_null(self, context: ast.expr) -> bool:
        """Whether the settings turn a context into `nullcontext()`."""
        while isinstance(context, ast.IfExp):
            test = self._value(context.test)
            if test is _OPEN:
                return False
            context = context.body if test else context.orelse
        return isinstance(context, ast.Call) and ast.unparse(context) == "nullcontext()"

    # ---- expressions -----------------------------------------------------------------------------

    def _value(self, node: ast.expr) -> Any:
        """The value of an expression, or _OPEN if it does not depend on settings only."""
        if isinstance(node, ast.BoolOp):
            stops = isinstance(node.op, ast.Or)
            values = [self._value(operand) for operand in node.values]
            if any(value is not _OPEN and bool(value) is stops for value in values):
                return stops
            return _OPEN if _OPEN in values else not stops
        names = [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
        if not names or not all(name in self._settings for name in names):
            return _OPEN
        code = compile(ast.Expression(node), "<settings>", "eval")
        return eval(code, {"__builtins__": {}}, dict(self._settings))

    def _expression(self, node: Any) -> None:
        """Fold an expression and its parts."""
        if isinstance(node, ast.JoinedStr):
            # Python 3.11 does not say where the parts of an f-string are.
            return
        if isinstance(node, ast.IfExp) and (chosen := self._chosen(node)) is not None:
            outer = self._start(node), self._end(node)
            self._extract(self._with_brackets(*outer), self._start(chosen), self._end(chosen))
            self._expression(chosen)
        elif isinstance(node, ast.Name) and node.id in self._inlined:
            self._cut(self._start(node), self._end(node), self._inlined[node.id])
        else:
            dropped = self._drop_operands(node) if isinstance(node, ast.BoolOp) else ()
            before: Any = None
            for child in _children(node):
                literal = self._spread(child)
                if literal is not None:
                    self._write_out(child, literal, before, isinstance(node, ast.Call))
                elif child not in dropped:
                    self._expression(child)
                before = child

    def _chosen(self, node: ast.expr) -> ast.expr | None:
        """The branch of a conditional expression that settings select; None if they do not."""
        if not isinstance(node, ast.IfExp) or (test := self._value(node.test)) is _OPEN:
            return None
        return node.body if test else node.orelse

    def _extract(self, outer: tuple[int, int], start: int, end: int) -> None:
        """Keep only a part of an expression, moved to where the expression began."""
        self._cut(outer[0], start)
        self._cut(end, outer[1])
        first, last = self._line_at(start), self._line_at(end)
        if first > self._line_at(outer[0]):
            begins = self._indentation(self._line_at(outer[0]))
            self._move(first + 1, last, self._indentation(first) - begins)

    def _line_at(self, offset: int) -> int:
        """The number, counted from 1, of the line with this offset."""
        return bisect_right(self._offsets, offset)

    def _indentation(self, number: int) -> int:
        """The number of spaces before the line with this number."""
        line = self._lines[number - 1]
        return len(line) - len(line.lstrip())

    def _with_brackets(self, start: int, end: int) -> tuple[int, int]:
        """The span of an expression, with parentheses that only break its lines."""
        before, after = self._text[:start].rstrip(), self._text[end:]
        space = len(after) - len(after.lstrip())
        if "\n" in self._text[len(before) : start] and before.endswith("("):
            return len(before) - 1, end + space + 1
        return start, end

    def _drop_operands(self, node: ast.BoolOp) -> list[ast.expr]:
        """Cut and return the operands of `and` or `or` that settings decide.

        They must be true for `and` and false for `or`, so that cutting them changes nothing.
        """
        operands = node.values
        dropped = [operand for operand in operands if self._value(operand) is not _OPEN]
        kept = False
        for index, operand in enumerate(operands):
            if operand not in dropped:
                kept = True
            elif kept:
                self._cut(self._end(operands[index - 1]), self._end(operand))
            else:
                self._cut(self._start(operand), self._start(operands[index + 1]))
        return dropped

    def _spread(self, child: ast.AST) -> ast.Dict | ast.List | None:
        """The literal that settings select in `*(... if ... else ...)`, also with `**`; or None."""
        if isinstance(child, (_Entry, ast.Starred)) or (
            isinstance(child, ast.keyword) and child.arg is None
        ):
            chosen = self._chosen(child.value)
            return chosen if isinstance(chosen, (ast.Dict, ast.List)) else None
        return None

    def _write_out(
        self, child: Any, literal: ast.Dict | ast.List, before: Any, is_call: bool
    ) -> None:
        """Replace a spread literal by its items, or cut it if it is empty.

        `before` is the item before it. In a call, items of a dictionary become keyword arguments.
        """
        start, end = self._start(child.value), self._end(child.value)
        start = len(self._text[:start].rstrip().removesuffix("(").rstrip("*"))
        end = self._text.index(")", end) + 1
        values = literal.values if isinstance(literal, ast.Dict) else literal.elts
        if not values:
            number = self._line_at(start)
            if self._lines[number - 1][: start - self._offsets[number - 1]].strip():
                self._cut(self._end(before), end)
            else:
                self._cut_lines(number, self._line_at(end))
            return
        keys = literal.keys if isinstance(literal, ast.Dict) else values
        assert keys[0] is not None
        self._extract((start, end), self._start(keys[0]), self._end(values[-1]))
        for key, value in zip(keys, values, strict=True):
            if is_call and isinstance(key, ast.Constant) and key is not value:
                self._cut(self._start(key), self._start(value), f"{key.value!s}=")
            self._expression(value)


class _Entry(NamedTuple):
    """A `**value` item of a dictionary."""

    value: ast.expr


def _children(node: ast.AST) -> Iterator[Any]:
    """The parts of a node; a `**value` item of a dictionary is an `_Entry`."""
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            yield from (key, value) if key is not None else (_Entry(value),)
    else:
        yield from ast.iter_child_nodes(node)


def _last(statement: ast.stmt) -> int:
    """The number of the last line of a statement."""
    assert statement.end_lineno is not None
    return statement.end_lineno
