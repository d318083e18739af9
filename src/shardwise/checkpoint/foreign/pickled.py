"""A pickle machine that can do little: it builds texts, numbers, tables and records.

Nothing is imported and nothing is called. What a pickle names stays a name, and what it says of
an object is kept as the fields of a `Record`. Every instruction that the metadata of a checkpoint
does not need is refused, and no count in it makes room for more than there are bytes.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from shardwise.checkpoint.format.paths import UntrustedError


class Name(NamedTuple):
    """What a pickle would have imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"[:100]


class Record:
    """An object of the class `kind`, or what a call of it with `arguments` would have made.

    Equal only to itself, so that one may be a key without anything of it being looked at.
    """

    __slots__ = ("arguments", "kind", "state")

    def __init__(self, kind: Name, arguments: tuple[Any, ...]) -> None:
        self.kind, self.arguments, self.state = kind, arguments, None

    state: Any

    def field(self, name: str) -> Any:
        """None where it has none of this name."""
        return self.state.get(name) if type(self.state) is dict else None


def load(data: bytes, known: Callable[[str, str], bool]) -> Any:
    """What `data` describes; `known` says which names it may hold.

    Raises UntrustedError.
    """
    machine = _Machine(data, known)
    # All of it lives until the end: to look for garbage meanwhile takes as long as the rest.
    collects = gc.isenabled()
    gc.disable()
    try:
        return machine.run()
    except (IndexError, struct.error, TypeError, ValueError, AttributeError):
        raise UntrustedError(f"is no pickle that makes sense, at byte {machine.at:,}") from None
    finally:
        if collects:
            gc.enable()


class _Machine:
    """The stack has marks in it as positions, and is never shorter than the last of them."""

    def __init__(self, data: bytes, known: Callable[[str, str], bool]) -> None:
        self.data, self.known, self.at = data, known, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []

    def run(self) -> Any:
        """The few instructions that are most of a pickle are here, the others in the table."""
        data, stack, memo, table = self.data, self.stack, self.memo, _INSTRUCTIONS
        at, end = 0, len(self.data)
        while at < end:
            code = data[at]
            if code == 0x94:  # MEMOIZE
                memo.append(stack[-1])
                at += 1
            elif code == 0x6A:  # LONG_BINGET
                stack.append(memo[int.from_bytes(data[at + 1 : at + 5], "little")])
                at += 5
            elif code == 0x68:  # BINGET
                stack.append(memo[data[at + 1]])
                at += 2
            elif code == 0x4B:  # BININT1
                stack.append(data[at + 1])
                at += 2
            elif code == 0x28:  # MARK
                self.marks.append(len(stack))
                at += 1
            elif (instruction := table[code]) is not None:
                self.at = at + 1
                instruction(self)
                at = self.at
            elif code == 0x2E:  # STOP
                return self._result(at + 1)
            else:
                what = f"the instruction {code:#04x} at byte {at:,}"
                raise UntrustedError(f"holds {what}, which no checkpoint needs")
        raise UntrustedError("is cut off")

    def _result(self, end: int) -> Any:
        if end != len(self.data) or len(self.stack) != 1:
            raise UntrustedError("goes on behind its end")
        return self.stack[0]

    # ---- bytes that follow an instruction

    def take(self, count: int) -> bytes:
        begin = self.at
        self.at = begin + count
        if self.at > len(self.data):
            raise UntrustedError("is cut off")
        return self.data[begin : self.at]

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    # ---- the stack

    def pop_marked(self) -> list[Any]:
        begin = self.marks.pop()
        found = self.stack[begin:]
        del self.stack[begin:]
        return found

    def put(self, place: int) -> None:
        """Picklers number from zero; a number far off would only make room."""
        if place != len(self.memo):
            raise UntrustedError("remembers objects out of order")
        self.memo.append(self.stack[-1])

    def pack(self, count: int) -> None:
        if len(self.stack) < count:
            raise IndexError
        self.stack[-count:] = [tuple(self.stack[-count:])]

    # ---- what would have run

    def find(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str or not self.known(module, name):
            raise UntrustedError(
                f"asks for '{module}.{name}'"[:120] + ", which no checkpoint needs"
            )
        self.stack.append(Name(module, name))

    def find_on_stack(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.find(module, name)

    def find_in_lines(self) -> None:
        end = self.data.index(b"\n", self.data.index(b"\n", self.at) + 1)
        module, name = self.take(end - self.at).decode().split("\n")
        self.at += 1
        self.find(module, name)

    def call(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if type(kind) is not Name or type(arguments) is not tuple:
            raise UntrustedError("calls what cannot be called")
        self.stack.append(Record(kind, arguments))

    def build(self) -> None:
        state, record = self.stack.pop(), self.stack[-1]
        if type(record) is not Record or record.state is not None:
            raise UntrustedError("gives fields to what has none")
        record.state = state

    # ---- tables and lists

    def append(self) -> None:
        value = self.stack.pop()
        self._extend(self.stack[-1], [value])

    def append_all(self) -> None:
        values = self.pop_marked()
        self._extend(self.stack[-1], values)

    @staticmethod
    def _extend(found: Any, values: list[Any]) -> None:
        if type(found) is not list:
            raise UntrustedError("appends to what is no list")
        found += values

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def set_all(self) -> None:
        self._set(self.pop_marked())

    def _set(self, pairs: list[Any]) -> None:
        table = self.stack[-1]
        if type(table) is not dict or len(pairs) % 2:
            raise UntrustedError("adds to what is no table")
        # Nothing nested: to hash a tuple of a million tuples ends the process.
        if not _KEYS.issuperset(map(type, pairs[::2])):
            raise UntrustedError("has a table with keys that no checkpoint has")
        table.update(zip(pairs[::2], pairs[1::2], strict=True))


_KEYS = {str, int, Record}
_Instruction = Callable[[_Machine], None]


def _push(make: Callable[[_Machine], Any]) -> _Instruction:
    return lambda machine: machine.stack.append(make(machine))


def _signed(machine: _Machine, count: int) -> int:
    return int.from_bytes(machine.take(count), "little", signed=True)


def _text(width: int) -> _Instruction:
    return _push(lambda m: m.take(m.number(width)).decode("utf-8", "surrogatepass"))


def _frame(machine: _Machine) -> None:
    if machine.number(8) > len(machine.data) - machine.at:
        raise UntrustedError("is cut off")


def _protocol(machine: _Machine) -> None:
    if not 2 <= machine.number(1) <= 5:
        raise UntrustedError("is a pickle of another protocol")


_BY_CODE: dict[int, _Instruction] = {
    0x80: _protocol,
    0x95: _frame,
    # Texts, bytes and numbers.
    0x8C: _text(1),
    0x58: _text(4),
    0x8D: _text(8),
    0x43: _push(lambda m: m.take(m.number(1))),
    0x42: _push(lambda m: m.take(m.number(4))),
    0x4D: _push(lambda m: m.number(2)),
    0x4A: _push(lambda m: _signed(m, 4)),
    0x8A: _push(lambda m: _signed(m, m.number(1))),
    0x47: _push(lambda m: struct.unpack(">d", m.take(8))[0]),
    0x4E: _push(lambda _: None),
    0x88: _push(lambda _: True),
    0x89: _push(lambda _: False),
    # Tuples, lists and tables.
    0x29: lambda m: m.stack.append(()),
    0x85: lambda m: m.pack(1),
    0x86: lambda m: m.pack(2),
    0x87: lambda m: m.pack(3),
    0x74: lambda m: m.stack.append(tuple(m.pop_marked())),
    0x5D: lambda m: m.stack.append([]),
    0x61: _Machine.append,
    0x65: _Machine.append_all,
    0x7D: lambda m: m.stack.append({}),
    0x73: _Machine.set_item,
    0x75: _Machine.set_all,
    # What was seen before.
    0x71: lambda m: m.put(m.number(1)),
    0x72: lambda m: m.put(m.number(4)),
    # Names, calls and objects: none of it happens.
    0x93: _Machine.find_on_stack,
    0x63: _Machine.find_in_lines,
    0x81: _Machine.call,
    0x52: _Machine.call,
    0x62: _Machine.build,
}
_INSTRUCTIONS = [_BY_CODE.get(code) for code in range(256)]
