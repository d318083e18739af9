"""Read pickles without running them: memory snapshots and the metadata of torch's checkpoints.

A pickle is a program, and `pickle.load` imports and calls whatever it names. Here every name is
replaced with `Record`, a class that keeps the arguments it is called with: nothing is imported, and
nothing with an effect is called. A pickle that would take all memory or time, or crash the
interpreter, does so in a child process with limits, which reads the same bytes first.
"""

from __future__ import annotations

import gc
import io
import pickle
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

# Longest tuple inside a tuple: without a limit, nested tuples could take forever to hash.
NESTED_TUPLE_LIMIT = 64
# Limits of the child: per byte of the pickle, and at least.
MEMORY_PER_BYTE, LEAST_MEMORY = 24, 768 << 20
SECONDS_PER_BYTE, LEAST_SECONDS = 1e-6, 20
# Largest pickle that is read where the system cannot limit the memory of a process.
UNLIMITED_BYTES = 64 << 20
# Bytes of the child's stack: less than any stack on which this process reads the pickle again.
_STACK = 256 << 10
_INVALID, _TOO_LARGE, _NESTED, _NO_LIMIT = 10, 11, 12, 13


class UnsafePickleError(Exception):
    """The data is damaged, or would do more than build plain data.

    The message continues a sentence that starts with the file's name. `reference` is the name the
    pickle wanted to import.
    """

    def __init__(self, message: str, *, reference: str = "") -> None:
        super().__init__(message)
        self.reference = reference


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

    __slots__ = ("arguments", "state")
    kind: Name
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> Record:
        record = super().__new__(cls)
        record.arguments, record.state = arguments, None
        return record

    def __setstate__(self, state: Any) -> None:
        if self.state is not None:
            raise pickle.UnpicklingError
        self.state = state

    def field(self, name: str) -> Any:
        """The field of this name; None if there is none."""
        return self.state.get(name) if type(self.state) is dict else None


def _allow_nothing(module: str, name: str) -> bool:
    """False: no name may occur in a pickle."""
    return False


def _allow_everything(module: str, name: str) -> bool:
    """True: every name may occur in a pickle."""
    return True


# Members of the enumerations that a pickle may name, by module and class.
Members = Mapping[tuple[str, str], Collection[str]]
# What protocols call getattr. Python 3.11.2 pickles a member of an enumeration as its call.
_GETATTR = (("builtins", "getattr"), ("__builtin__", "getattr"))


def _member_getter(members: Members) -> type[Record]:
    """The class that stands for getattr: it gives these members, and nothing else."""

    class MemberGetter(Record):
        __slots__ = ()
        kind = Name(*_GETATTR[0])

        def __new__(cls, *arguments: Any) -> Any:
            owner, name = arguments
            is_class = isinstance(owner, type) and issubclass(owner, Record)
            if is_class and type(name) is str and name in members.get(owner.kind, ()):
                return owner(name)
            raise _refusal(cls.kind)

    return MemberGetter


def _refusal(name: Name) -> UnsafePickleError:
    """The error of a pickle that names a class or function that is not allowed."""
    return UnsafePickleError(
        f"would import {str(name)!r} if it were unpickled; refused", reference=str(name)
    )


class _Reader(pickle.Unpickler):
    """Replaces every class or function that a pickle names with a subclass of `Record`."""

    def __init__(self, file: Any, is_allowed: Callable[[str, str], bool], members: Members) -> None:
        super().__init__(file)
        self._is_allowed = is_allowed
        self._member_getter = _member_getter(members) if members else None
        self._kinds: dict[Name, type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """The subclass of `Record` for a name; raise UnsafePickleError if it is not allowed."""
        if self._member_getter and (module, name) in _GETATTR:
            return self._member_getter
        wanted = Name(module, name)
        if not self._is_allowed(module, name):
            raise _refusal(wanted)
        if wanted not in self._kinds:
            members = {"__slots__": (), "kind": wanted}
            self._kinds[wanted] = type("Record", (Record,), members)
        return self._kinds[wanted]


def load_pickle(
    data: bytes,
    is_allowed: Callable[[str, str], bool] = _allow_nothing,
    members: Members | None = None,
) -> Any:
    """Return the value that `data` describes; raise UnsafePickleError.

    `is_allowed(module, name)` decides which names may occur; by default none, so that the result
    is plain data. `members` may be taken from their enumerations by `getattr`: each becomes a
    record of its enumeration with its name as argument.
    """
    _read_in_child(data)
    return _read(data, is_allowed, members or {})


def _read(data: bytes, is_allowed: Callable[[str, str], bool], members: Members) -> Any:
    """Return the value that `data` describes, without limits; raise UnsafePickleError."""
    # Buffered, so that the reader reads ahead instead of calling for every instruction.
    file = io.BufferedReader(io.BytesIO(data))
    # Everything lives until the end: garbage collection in between would double the time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        found = _Reader(file, is_allowed, members).load()
    except (UnsafePickleError, MemoryError):
        raise
    except Exception:  # invalid instructions raise errors of many types
        raise UnsafePickleError("is not a valid pickle") from None
    finally:
        if was_enabled:
            gc.enable()
    if file.read(1):
        raise UnsafePickleError("continues after its end")
    return found


def _read_in_child(data: bytes) -> None:
    """Read `data` in a child process with limits; raise UnsafePickleError if that fails."""
    memory = max(LEAST_MEMORY, MEMORY_PER_BYTE * len(data))
    seconds = int(LEAST_SECONDS + SECONDS_PER_BYTE * len(data))
    # Here, because the child runs this file without any package, and starts sooner without them.
    import subprocess

    from shardwise.launch.child import start_python

    try:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        words = _child_arguments(memory, seconds)
        with start_python(*words, stdin=subprocess.PIPE, **quiet) as child:
            try:
                child.communicate(data, timeout=20 * seconds)
            finally:
                child.kill()
    except OSError:
        raise UnsafePickleError("cannot be read: no process can be started to try it") from None
    except subprocess.TimeoutExpired:
        raise UnsafePickleError("takes too long to read") from None
    if child.returncode == _NO_LIMIT and len(data) <= UNLIMITED_BYTES:
        return
    reasons = {
        _INVALID: "is not a valid pickle",
        _TOO_LARGE: f"needs more than {memory >> 20:,} MiB to be read",
        _NESTED: "nests tuples too deeply",
        _NO_LIMIT: f"has more than {UNLIMITED_BYTES >> 20} MiB, and this system cannot limit the "
        "memory of a process; read it on Linux",
    }
    if child.returncode:
        raise UnsafePickleError(
            reasons.get(child.returncode, "crashes or does not end where it is read")
        )


def _child_arguments(memory: int, seconds: int) -> list[str]:
    """Arguments of a Python that runs this file and imports only the standard library."""
    return ["-I", "-S", __file__, str(memory), str(seconds)]


def _nests_tuples() -> bool:
    """Whether a tuple, not frozen by gc, holds a large tuple or one that holds another tuple."""
    return any(
        type(inner) is tuple
        and (len(inner) > NESTED_TUPLE_LIMIT or any(type(one) is tuple for one in inner))
        for outer in gc.get_objects()
        if type(outer) is tuple
        for inner in outer
    )


def _read_within_limits(memory: int, seconds: int) -> int:
    """Read a pickle from standard input, within limits; return the exit code."""
    data = sys.stdin.buffer.read()
    limited = _limit(memory, seconds)
    gc.disable()
    gc.freeze()
    try:
        value = _read(data, _allow_everything, {})  # noqa: F841 (alive while tuples are looked at)
        nested = _nests_tuples()
    except UnsafePickleError:
        return _INVALID
    except MemoryError:
        return _TOO_LARGE
    return _NESTED if nested else 0 if limited else _NO_LIMIT


def _limit(memory: int, seconds: int) -> bool:
    """Limit memory (bytes) and CPU time (seconds) of this process; return if memory is limited."""
    try:
        import resource
    except ImportError:  # Windows
        return False
    limited = False
    for kind, wanted in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, seconds),
                        (resource.RLIMIT_AS, memory)):  # fmt: skip
        most = resource.getrlimit(kind)[1]  # the limit of the parent process may be lower
        value = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        try:
            resource.setrlimit(kind, (value, value))
            limited = kind == resource.RLIMIT_AS
        except (ValueError, OSError):  # macOS may refuse one
            continue
    return limited and sys.platform == "linux"  # elsewhere the limit is accepted and ignored


def _main() -> None:
    """Read a pickle in this child process; the exit code says whether that is safe."""
    import os

    codes: list[int] = []
    threading.stack_size(_STACK)
    reader = threading.Thread(
        target=lambda: codes.append(_read_within_limits(*map(int, sys.argv[1:])))
    )
    reader.start()
    reader.join()
    # The value is not freed: that would take as long as reading it.
    os._exit(codes[0] if codes else _TOO_LARGE)


if __name__ == "__main__":
    _main()
