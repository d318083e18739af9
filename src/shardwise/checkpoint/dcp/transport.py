"""The state of a training, sent from one process to another that is behind.

Who asks proves that it knows the sender's secret, and so does the sender, in an answer to random
bytes of both. Bytes of tensors travel as they are, with a checksum for each 16 MiB. Nothing is
unpickled. The receiver allocates only what its own model needs, and returns nothing before all of
it is verified.
The methods are those of torchft's CheckpointTransport, which calls them.
"""

from __future__ import annotations

import math
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
import torch

from shardwise.checkpoint.dcp.raw import bytes_of
from shardwise.checkpoint.format.checksum import blocks, crc32
from shardwise.checkpoint.format.pieces import Tensor
from shardwise.engine.channel import CHALLENGE_BYTES, Channel, ForgedError, Secret, body_of
from shardwise.engine.store import listen
from shardwise.engine.torch_private import local_tensor
from shardwise.spec.foreign_text import one_line

_HEAD = struct.Struct(">II")
_CHECKSUM = struct.Struct(">I")
# More than the header of any model, less than would exhaust memory.
_LONGEST_HEADER, _LONGEST_REQUEST = 2**28, 4096
# Connections that are served at a time, and seconds in which one has to say what it wants.
_MOST_CONNECTIONS, _REQUEST_S = 64, 10.0


class TransferError(RuntimeError):
    """The state did not arrive, or not intact; nothing of it was used."""


class _Address(msgspec.Struct, frozen=True):
    """Where a process offers its state, and the secret that who asks must know."""

    host: str
    port: int
    secret: str


class _Request(msgspec.Struct, frozen=True):
    """The step that is asked for, and random bytes of who asks, in hexadecimal digits."""

    step: int
    challenge: str


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor: its name, dtype and full shape, and the bytes of the sender's part of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


class _Header(msgspec.Struct, frozen=True):
    counters: dict[str, int]
    tensors: list[_Entry]


class _Offer(NamedTuple):
    step: int
    header: bytes
    tensors: Mapping[str, torch.Tensor]


# From the tensors of a sender to those of this process that they are for.
Allocate = Callable[[Mapping[str, Tensor]], Mapping[str, torch.Tensor]]


class TensorTransport:
    """Offers the state of this process to others, and receives that of another.

    It listens on `address` only, at a port that is free.
    """

    def __init__(self, address: str, allocate: Allocate) -> None:
        self._allocate = allocate
        self._listener = listen(address)
        self._secret = secrets.token_hex(16)
        self._host, self._port = address, self._listener.getsockname()[1]
        self._changed = threading.Condition()
        self._offer: _Offer | None = None
        self._sending = 0
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._timeout_s = 60.0
        # Why the last state was not received.
        self.failure: Exception | None = None
        threading.Thread(target=self._accept, daemon=True, name="replica-transport").start()

    # ---- called by torchft -----------------------------------------------------------------------

    def metadata(self) -> str:
        """How another process finds this one."""
        return msgspec.json.encode(_Address(self._host, self._port, self._secret)).decode()

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Mapping[str, Any], timeout: timedelta
    ) -> None:
        """Offer the state until `disallow_checkpoint`; threads send it meanwhile."""
        tensors: Mapping[str, torch.Tensor] = state_dict["user"]["default"]
        entries = [
            _Entry(name, _dtype(tensor), tuple(tensor.shape), local_tensor(tensor).nbytes)
            for name, tensor in tensors.items()
        ]
        header = msgspec.json.encode(_Header(dict(state_dict["torchft"]), entries))
        with self._changed:
            self._timeout_s = timeout.total_seconds()
            self._offer = _Offer(step, header, tensors)
            self._changed.notify_all()

    def disallow_checkpoint(self) -> None:
        """Withdraw the offer; wait until nothing is being sent, so that tensors may change."""
        with self._changed:
            self._offer = None
            self._changed.wait_for(lambda: self._sending == 0)

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta
    ) -> dict[str, Any]:
        """The state of another process after `step` steps, verified."""
        self.failure = None
        try:
            address = msgspec.json.decode(metadata, type=_Address)
            seconds = timeout.total_seconds()
            with socket.create_connection((address.host, address.port), seconds) as connection:
                return self._receive(connection, _ask(connection, address.secret, step))
        except Exception as error:
            # torchft only notes that there was an error.
            self.failure = error
            raise

    def shutdown(self, wait: bool = True) -> None:
        self._listener.close()

    # ---- sending ---------------------------------------------------------------------------------

    def _accept(self) -> None:
        with suppress(OSError):  # closed by shutdown
            while True:
                connection, _ = self._listener.accept()
                # Idle connections of strangers hold neither threads nor this one for long.
                self._free.acquire()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            self._answer(connection)
        finally:
            self._free.release()

    def _answer(self, connection: socket.socket) -> None:
        # A receiver that is gone gets nothing; it says so itself.
        with connection, suppress(OSError, msgspec.MsgspecError, TransferError, ForgedError):
            connection.settimeout(min(_REQUEST_S, self._timeout_s))
            request, channel = self._request(connection)
            connection.settimeout(self._timeout_s)
            offer = self._begin_sending(request.step)
            if offer is None:
                return
            try:
                _send(connection, offer, channel)
            finally:
                with self._changed:
                    self._sending -= 1
                    self._changed.notify_all()

    def _request(self, connection: socket.socket) -> tuple[_Request, Channel]:
        """What a holder of the secret asks for; raises ForgedError for others."""
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        connection.sendall(challenge)
        padded = _read(connection, _LONGEST_REQUEST, time.monotonic() + _REQUEST_S)
        line = bytes(padded).rstrip(b" ")
        channel = Secret(self._secret).channel(challenge, body_of(line), serves=True)
        return msgspec.json.decode(channel.open(line), type=_Request), channel

    def _begin_sending(self, step: int) -> _Offer | None:
        """The offer of a step, which may be made only after it is asked for."""
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            self._changed.wait_for(
                lambda: self._offer is not None and self._offer.step == step,
                deadline - time.monotonic(),
            )
            if self._offer is None or self._offer.step != step:
                return None
            self._sending += 1
            return self._offer

    # ---- receiving -------------------------------------------------------------------------------

    def _receive(self, connection: socket.socket, channel: Channel) -> dict[str, Any]:
        length, checksum = _HEAD.unpack(_read(connection, _HEAD.size))
        if length > _LONGEST_HEADER:
            raise TransferError(f"a header of {length:,} bytes is longer than that of any model")
        head = _read(connection, length)
        if crc32(head) != checksum:
            raise TransferError("the list of tensors was damaged on the way")
        try:
            header = msgspec.json.decode(channel.open(bytes(head)), type=_Header)
        except ForgedError:
            raise TransferError("the list of tensors is not of the other replica group") from None
        offered = {one.name: Tensor(one.name, one.dtype, one.shape) for one in header.tensors}
        own = self._allocate(offered)
        _check_same(own, header.tensors)
        received = {
            entry.name: _receive_tensor(connection, entry.name, local_tensor(own[entry.name]))
            for entry in header.tensors
        }
        return {"user": {"default": received}, "torchft": header.counters}


def _ask(connection: socket.socket, secret: str, step: int) -> Channel:
    """Ask for the state of a step; return the channel on which it is answered."""
    challenge = bytes(_read(connection, CHALLENGE_BYTES))
    body = msgspec.json.encode(_Request(step, secrets.token_hex(CHALLENGE_BYTES)))
    channel = Secret(secret).channel(challenge, body, serves=False)
    connection.sendall(channel.seal(body).ljust(_LONGEST_REQUEST))
    return channel


def _check_same(own: Mapping[str, torch.Tensor], offered: list[_Entry]) -> None:
    """Raise TransferError unless a sender's tensors are those of this process."""
    names = {entry.name for entry in offered}
    if other := sorted(names ^ own.keys()):
        raise TransferError(f"{one_line(other[0][:200])} is in one of the two replica groups only")
    for entry in offered:
        tensor = own[entry.name]
        here = (_dtype(tensor), tuple(tensor.shape), local_tensor(tensor).nbytes)
        if here != (entry.dtype, entry.shape, entry.bytes):
            raise TransferError(
                f"{entry.name} is {one_line(entry.dtype[:20])} {list(entry.shape)} in the other "
                f"replica group and {here[0]} {list(here[1])} in this one"
            )


def _send(connection: socket.socket, offer: _Offer, channel: Channel) -> None:
    head = channel.seal(offer.header)
    connection.sendall(_HEAD.pack(len(head), crc32(head)) + head)
    for tensor in offer.tensors.values():
        data = bytes_of(local_tensor(tensor))
        for begin, end in blocks(len(data)):
            block = data[begin:end]
            connection.sendall(block)
            connection.sendall(_CHECKSUM.pack(crc32(block)))


def _receive_tensor(connection: socket.socket, name: str, like: torch.Tensor) -> torch.Tensor:
    """A tensor in host memory, every block of it verified."""
    tensor = torch.empty(like.shape, dtype=like.dtype)
    data = bytes_of(tensor)
    for begin, end in blocks(len(data)):
        _read_into(connection, data[begin:end])
        if crc32(data[begin:end]) != _CHECKSUM.unpack(_read(connection, _CHECKSUM.size))[0]:
            raise TransferError(f"{name} was damaged on the way")
    return tensor


def _read(connection: socket.socket, length: int, deadline: float = math.inf) -> bytearray:
    data = bytearray(length)
    _read_into(connection, memoryview(data), deadline)
    return data


def _read_into(connection: socket.socket, view: memoryview, deadline: float = math.inf) -> None:
    while view:
        if time.monotonic() > deadline:
            raise TransferError("the other side sends too slowly")
        count = connection.recv_into(view)
        if not count:
            raise TransferError("the other replica group closed the connection")
        view = view[count:]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
