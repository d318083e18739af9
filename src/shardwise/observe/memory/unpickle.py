"""Pickles of plain data, read without running what they may carry.

A pickle is a program. Before any of it runs, all its instructions are looked at, and one that does
more than make a number, a string, a list or a dict refuses the file. What is left can make no
object of a class, no key that takes forever to hash and no table larger than the file deserves.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any, Never

from shardwise.observe.memory.read_file import read_file
from shardwise.observe.memory.text import printable
from shardwise.spec.record import SpecError

_LONG = b"|".join(b"%c.{%d}" % (width, width) for width in range(1, 8))
# Below 2^61 no two numbers have one hash: above, a dict of them can be made to take forever.
_INTEGER = rb"(?:K.|M..|J....|\x8a(?:%b|\x08.{7}[\x00-\x1e]))" % _LONG
# Tuples only of numbers: of nested ones, the hash alone can overflow the stack or take forever.
_TUPLE = rb"%b(?:\x85|%b(?:\x86|%b\x87))" % (_INTEGER, _INTEGER, _INTEGER)
# In turn: reading back; remembering (LONG_BINPUT only with a small number); none, true, false,
# empty list, dict and tuple, mark, append, set; a float; a frame.
_OTHER = rb"j....|h.|q.|r..[\x00-\x0f]\x00|[\x94N\x88\x89\]})(aesu]|G.{8}|\x95.{8}"
_HARMLESS = re.compile(rb"(?:%b|%b|%b)*+" % (_OTHER, _TUPLE, _INTEGER), re.DOTALL)
_TEXT_LENGTH = {0x8C: 1, 0x58: 4, 0x8D: 8}
_PROTO, _STOP, _LONG_BINPUT = 0x80, 0x2E, 0x72
_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_RUNS_CODE = {"GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "REDUCE", "NEWOBJ", "NEWOBJ_EX", "BUILD",
              "EXT1", "EXT2", "EXT4"}  # fmt: skip
_ASKS_OUTSIDE = {"PERSID", "BINPERSID", "NEXT_BUFFER", "READONLY_BUFFER"}


def read_pickle(path: Path) -> Any:
    """The plain data in a pickle, gzip or not; a SpecError where it is anything else."""
    return loads(read_file(path), str(path))


def loads(data: bytes, where: str) -> Any:
    """The plain data in `data`; `where` names it in errors."""
    _check(data, where)
    try:
        return _Plain(io.BytesIO(data)).load()
    except SpecError:
        raise
    except Exception as error:
        # A pickle can be wrong in as many ways as there are instructions.
        raise SpecError(
            f"memory: {where} is a broken pickle ({printable(str(error), 60)})"
        ) from None


class _Plain(pickle.Unpickler):
    """The second lock: even an instruction that was overlooked finds nothing to call."""

    def find_class(self, module: str, name: str) -> Never:
        raise SpecError(
            f"memory: the file asks for {printable(f'{module}.{name}', 60)} and is not read"
        )

    def persistent_load(self, pid: Any) -> Never:
        raise SpecError("memory: the file asks for an object outside itself and is not read")


def _check(data: bytes, where: str) -> None:
    """Refuse anything that is not a sequence of harmless instructions that ends."""
    at, end = 0, len(data)
    texts = ["", ""]
    while True:
        match = _HARMLESS.match(data, at)
        at = match.end() if match else at
        if at >= end:
            raise SpecError(f"memory: {where} is cut off or no pickle; record it again")
        code = data[at]
        if code == _STOP:
            return
        if code in _TEXT_LENGTH:
            width = _TEXT_LENGTH[code]
            start = at + 1 + width
            length = int.from_bytes(data[at + 1 : start], "little")
            if start + length > end:
                raise SpecError(f"memory: {where} is cut off or no pickle; record it again")
            texts = [texts[1], data[start : start + min(length, 80)].decode("utf-8", "replace")]
            at = start + length
        elif code == _PROTO and at + 1 < end and data[at + 1] <= pickle.HIGHEST_PROTOCOL:
            at += 2
        elif code == _LONG_BINPUT and at + 5 <= end:
            # Room is made for all numbers below: an honest one counts what came before it.
            if int.from_bytes(data[at + 1 : at + 5], "little") > at:
                raise SpecError(f"memory: {where} is a broken pickle (it numbers what it has not)")
            at += 5
        else:
            _refuse(data, at, where, texts)


def _refuse(data: bytes, at: int, where: str, texts: list[str]) -> Never:
    name = _NAMES.get(data[at])
    if name in _RUNS_CODE:
        asked = _asked_for(data, at, name, texts)
        raise SpecError(
            f"memory: {where} asks to run code ({name}{asked}) and is not read; a snapshot holds "
            "only plain data"
        )
    if name in _ASKS_OUTSIDE:
        raise SpecError(
            f"memory: {where} asks for an object outside itself ({name}) and is not read"
        )
    if name is None or at == 0:
        raise SpecError(f"memory: {where} is no pickle of a memory snapshot")
    raise SpecError(
        f"memory: {where} holds more than plain data ({name}) and is not read; write it with "
        "torch.cuda.memory._dump_snapshot"
    )


def _asked_for(data: bytes, at: int, name: str, texts: list[str]) -> str:
    if name in ("GLOBAL", "INST"):
        lines = data[at + 1 : at + 200].split(b"\n")[:2]
        return " " + printable(".".join(line.decode("utf-8", "replace") for line in lines), 60)
    if name == "STACK_GLOBAL":
        return " " + printable(".".join(texts), 60)
    return ""
