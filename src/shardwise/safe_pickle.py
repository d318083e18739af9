"""Read pickles without running them: memory snapshots and the metadata of torch's checkpoints.

A pickle is a program, and `pickle.load` imports and calls whatever it names. This reader supports
only the instructions that build text, numbers, lists, dicts, tuples and records. Nothing is
imported and nothing is called: a name stays a `Name`, an object becomes a `Record` of its fields.
Every other instruction is refused. No count in the file allocates more memory than the file has
bytes, and no value takes long to hash.
"""

from __future__ import annotations

import gc
import pickletools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

# Integers at or above the modulus of Python's hash can be made to collide in any dict.
INTEGER_LIMIT = 2**61 - 1
# The longest tuple inside a tuple: nested ones without a limit could take forever to hash.
NESTED_TUPLE_LIMIT = 64
_OPCODE_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}


class UnsafePickleError(Exception):
    """The data is damaged, or would do more than build plain data.

    The message continues a sentence that starts with the file's name. `instruction` is the pickle
    instruction that was refused, `reference` the name the pickle wanted to import.
    """

    def __init__(self, message: str, *, instruction: str = "", reference: str = "") -> None:
        super().__init__(message)
        self.instruction, self.reference = instruction, reference


class Name(NamedTuple):
    """A class or function that unpickling would have imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"[:100]


class Record:
    """An object of class `kind`, or the result of calling it with `arguments`.

    Compares by identity, so that a record may be a dict key without hashing its content.
    """

    __slots__ = ("arguments", "kind", "state")

    def __init__(self, kind: Name, arguments: tuple[Any, ...]) -> None:
        self.kind, self.arguments, self.state = kind, arguments, None

    state: Any

    def field(self, name: str) -> Any:
        """The field of this name; None if there is none."""
        return self.state.get(name) if type(self.state) is dict else None


def _allow_nothing(module: str, name: str) -> bool:
    return False


def load_pickle(data: bytes, is_allowed: Callable[[str, str], bool] = _allow_nothing) -> Any:
    """Return the value that `data` describes; raise UnsafePickleError.

    `is_allowed(module, name)` decides which names may occur; by default none, so that the result
    is plain data.
    """
    machine = _Machine(data, is_allowed)
    # Everything lives until the end: garbage collection in between would double the time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return machine.run()
    except (IndexError, struct.error, TypeError, ValueError, AttributeError):
        raise UnsafePickleError(f"is not a valid pickle (byte {machine.at:,})") from None
    finally:
        if was_enabled:
            gc.enable()


class _Machine:
    """A stack machine; `marks` are positions in its stack."""

    def __init__(self, data: bytes, is_allowed: Callable[[str, str], bool]) -> None:
        self.data, self.is_allowed, self.at = data, is_allowed, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []

    def run(self) -> Any:  # noqa: PLR0912 (a call per instruction would double the time)
        """Execute; the instructions that make up most of a pickle are inlined here."""
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
            elif code == 0x4D:  # BININT2
                stack.append(data[at + 1] | data[at + 2] << 8)
                at += 3
            elif code == 0x8A and data[at + 1] < 8:  # LONG1
                until = at + 2 + data[at + 1]
                stack.append(int.from_bytes(data[at + 2 : until], "little", signed=True))
                at = until
            elif code == 0x7D:  # EMPTY_DICT
                stack.append({})
                at += 1
            elif code == 0x75:  # SETITEMS
                self.at = at
                self.set_all()
                at += 1
            elif (instruction := table[code]) is not None:
                self.at = at + 1
                instruction(self)
                at = self.at
            elif code == 0x2E:  # STOP
                return self._result(at + 1)
            else:
                self._refuse(code, at)
        raise UnsafePickleError("is truncated")

    def _refuse(self, code: int, at: int) -> None:
        name = _OPCODE_NAMES.get(code)
        if name is None or at == 0:
            raise UnsafePickleError("is not a pickle")
        raise UnsafePickleError(
            f"uses the pickle instruction {name} (byte {at:,}), which is not allowed",
            instruction=name,
        )

    def _result(self, end: int) -> Any:
        if end != len(self.data) or len(self.stack) != 1:
            raise UnsafePickleError("continues after its end")
        return self.stack[0]

    # ---- operands

    def take(self, count: int) -> bytes:
        begin = self.at
        self.at = begin + count
        if self.at > len(self.data):
            raise UnsafePickleError("is truncated")
        return self.data[begin : self.at]

    def unsigned(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    def signed(self, count: int) -> int:
        value = int.from_bytes(self.take(count), "little", signed=True)
        if abs(value) >= INTEGER_LIMIT:
            raise UnsafePickleError("contains an integer of more than 61 bits", instruction="LONG1")
        return value

    # ---- stack

    def pop_marked(self) -> list[Any]:
        begin = self.marks.pop()
        values = self.stack[begin:]
        del self.stack[begin:]
        return values

    def put(self, index: int) -> None:
        """Memoize; picklers count from zero, and a larger index would only reserve memory."""
        if index != len(self.memo):
            raise UnsafePickleError("memoizes objects out of order")
        self.memo.append(self.stack[-1])

    def pack(self, count: int) -> None:
        if len(self.stack) < count:
            raise IndexError
        values = self.stack[-count:]
        del self.stack[-count:]
        self.push_tuple(values)

    def push_tuple(self, values: list[Any]) -> None:
        for value in values:
            if type(value) is tuple and (
                len(value) > NESTED_TUPLE_LIMIT or any(type(inner) is tuple for inner in value)
            ):
                raise UnsafePickleError("nests tuples too deeply", instruction="TUPLE")
        self.stack.append(tuple(values))

    # ---- names and objects

    def find(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str or not self.is_allowed(module, name):
            reference = f"{module}.{name}"[:100]
            raise UnsafePickleError(
                f"would import {reference!r} if it were unpickled; refused", reference=reference
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
            raise UnsafePickleError("calls something that is not a class", instruction="REDUCE")
        self.stack.append(Record(kind, arguments))

    def build(self) -> None:
        state, record = self.stack.pop(), self.stack[-1]
        if type(record) is not Record or record.state is not None:
            raise UnsafePickleError("sets the state of a value that has none", instruction="BUILD")
        record.state = state

    # ---- lists and dicts

    def append(self) -> None:
        value = self.stack.pop()
        self._extend(self.stack[-1], [value])

    def append_all(self) -> None:
        values = self.pop_marked()
        self._extend(self.stack[-1], values)

    @staticmethod
    def _extend(target: Any, values: list[Any]) -> None:
        if type(target) is not list:
            raise UnsafePickleError("appends to a value that is not a list")
        target += values

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def set_all(self) -> None:
        self._set(self.pop_marked())

    def _set(self, pairs: list[Any]) -> None:
        table = self.stack[-1]
        if type(table) is not dict or len(pairs) % 2:
            raise UnsafePickleError("sets items of a value that is not a dict")
        # No tuples: hashing nested ones can overflow the stack.
        if not _KEY_TYPES.issuperset(map(type, pairs[::2])):
            raise UnsafePickleError("has dict keys that are not text, integers or records")
        table.update(zip(pairs[::2], pairs[1::2], strict=True))


_KEY_TYPES = {str, int, Record}
_Instruction = Callable[[_Machine], None]


def _push(make: Callable[[_Machine], Any]) -> _Instruction:
    return lambda machine: machine.stack.append(make(machine))


def _text(width: int) -> _Instruction:
    return _push(lambda m: m.take(m.unsigned(width)).decode("utf-8", "surrogatepass"))


def _frame(machine: _Machine) -> None:
    if machine.unsigned(8) > len(machine.data) - machine.at:
        raise UnsafePickleError("is truncated")


def _protocol(machine: _Machine) -> None:
    if not 2 <= machine.unsigned(1) <= 5:
        raise UnsafePickleError("uses a pickle protocol other than 2 to 5")


_BY_CODE: dict[int, _Instruction] = {
    0x80: _protocol,
    0x95: _frame,
    # Text, bytes and numbers.
    0x8C: _text(1),
    0x58: _text(4),
    0x8D: _text(8),
    0x43: _push(lambda m: m.take(m.unsigned(1))),
    0x42: _push(lambda m: m.take(m.unsigned(4))),
    0x4A: _push(lambda m: m.signed(4)),
    0x8A: _push(lambda m: m.signed(m.unsigned(1))),
    0x47: _push(lambda m: struct.unpack(">d", m.take(8))[0]),
    0x4E: _push(lambda _: None),
    0x88: _push(lambda _: True),
    0x89: _push(lambda _: False),
    # Tuples, lists and dicts.
    0x29: lambda m: m.stack.append(()),
    0x85: lambda m: m.pack(1),
    0x86: lambda m: m.pack(2),
    0x87: lambda m: m.pack(3),
    0x74: lambda m: m.push_tuple(m.pop_marked()),
    0x5D: lambda m: m.stack.append([]),
    0x61: _Machine.append,
    0x65: _Machine.append_all,
    0x73: _Machine.set_item,
    # The memo.
    0x71: lambda m: m.put(m.unsigned(1)),
    0x72: lambda m: m.put(m.unsigned(4)),
    # Names, calls and states: recorded, not executed.
    0x93: _Machine.find_on_stack,
    0x63: _Machine.find_in_lines,
    0x81: _Machine.call,
    0x52: _Machine.call,
    0x62: _Machine.build,
}
_INSTRUCTIONS = [_BY_CODE.get(code) for code in range(256)]
