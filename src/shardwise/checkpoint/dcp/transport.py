"""Send the state of a training run from one process to another that has fallen behind.

Both prove that they know the sender's secret, with random bytes that each chooses. Tensors are sent
as plain bytes, with a checksum for each 16 MiB. Nothing is unpickled. The receiver allocates only
the tensors of its own model, and returns nothing before all of them are verified.
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
from shardwise.pytorch.channel import CHALLENGE_BYTES, Channel, ForgedError, Secret, body_of
from shardwise.pytorch.private import local_tensor
from shardwise.pytorch.store import listen
from shardwise.spec.foreign_text import one_line

_HEAD = struct.Struct(">II")
_CHECKSUM = struct.Struct(">I")
# More than the header of any model, less than would exhaust memory.
_LONGEST_HEADER, _LONGEST_REQUEST = 2**28, 4096
# Connections that are served at a time, and seconds in which each has to send its request.
_MOST_CONNECTIONS, _REQUEST_S = 64, 10.0


class TransferError(RuntimeError):
    """The state did not arrive, or not intact; nothing of it was used."""


class _Address(msgspec.Struct, frozen=True):
    """Where a process offers its state, and the secret that a receiver must know."""

    host: str
    port: int
    secret: str


class _Request(msgspec.Struct, frozen=True):
    """The step that a receiver asks for, and random bytes of the receiver in hexadecimal digits."""

    step: int
    challenge: str


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor: its name, dtype and full shape, and the bytes of the sender's part of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


class _Header(msgspec.Struct, frozen=True):
    """torchft's counters, and the tensors that follow, in order."""

    counters: dict[str, int]
    tensors: list[_Entry]


class _Offer(NamedTuple):
    """The state of one step that a process offers; `header` is an encoded `_Header`."""

    step: int
    header: bytes
    tensors: Mapping[str, torch.Tensor]


# Returns the tensors of this process, given the tensors of a sender.
Allocate = Callable[[Mapping[str, Tensor]], Mapping[str, torch.Tensor]]


class TensorTransport:
    """Offers the state of this process to others, and receives the state of another process.

    It listens on `address` only, at any free port.
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
        # Why the last state was not received; None if it was.
        self.failure: Exception | None = None
        threading.Thread(target=self._accept, daemon=True, name="replica-transport").start()

    # ---- called by torchft -----------------------------------------------------------------------

    def metadata(self) -> str:
        """Address and secret of this process as JSON, with which another process connects to it."""
        return msgspec.json.encode(_Address(self._host, self._port, self._secret)).decode()

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Mapping[str, Any], timeout: timedelta
    ) -> None:
        """Offer the state after `step` steps until `disallow_checkpoint`; threads send it."""
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
        """Withdraw the offer; wait until no thread sends, so that tensors may change."""
        with self._changed:
            self._offer = None
            self._changed.wait_for(lambda: self._sending == 0)

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta
    ) -> dict[str, Any]:
        """Receive the state of another process after `step` steps, and verify it."""
        self.failure = None
        try:
            address = msgspec.json.decode(metadata, type=_Address)
            seconds = timeout.total_seconds()
            with socket.create_connection((address.host, address.port), seconds) as connection:
                return self._receive(connection, _request_state(connection, address.secret, step))
        except Exception as error:
            # torchft only notes that there was an error.
            self.failure = error
            raise

    def shutdown(self, wait: bool = True) -> None:
        """Stop listening."""
        self._listener.close()

    # ---- sending ---------------------------------------------------------------------------------

    def _accept(self) -> None:
        """Serve each connection in a thread of its own, until shutdown."""
        with suppress(OSError):  # closed by shutdown
            while True:
                connection, _ = self._listener.accept()
                # Idle connections of strangers soon time out, so this does not wait for long.
                self._free.acquire()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer one connection, then free its slot."""
        try:
            self._answer(connection)
        finally:
            self._free.release()

    def _answer(self, connection: socket.socket) -> None:
        """Read a request and send the state it asks for.

        Send nothing if the request is invalid, or if this step is not offered in time.
        """
        # If the transfer fails here, it also fails in the receiver, which reports it.
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
        """The request of a receiver, and the channel to answer it.

        Raises ForgedError if the receiver does not know the secret.
        """
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        connection.sendall(challenge)
        padded = _read(connection, _LONGEST_REQUEST, time.monotonic() + _REQUEST_S)
        line = bytes(padded).rstrip(b" ")
        channel = Secret(self._secret).channel(challenge, body_of(line), serves=True)
        return msgspec.json.decode(channel.open(line), type=_Request), channel

    def _begin_sending(self, step: int) -> _Offer | None:
        """Wait for the offer of a step, and count this thread as sending.

        None if the step is not offered before the timeout.
        """
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
        """Receive tensors and counters over a connection, and verify them."""
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


def _request_state(connection: socket.socket, secret: str, step: int) -> Channel:
    """Ask for the state of a step; return the channel that authenticates the answer."""
    challenge = bytes(_read(connection, CHALLENGE_BYTES))
    body = msgspec.json.encode(_Request(step, secrets.token_hex(CHALLENGE_BYTES)))
    channel = Secret(secret).channel(challenge, body, serves=False)
    connection.sendall(channel.seal(body).ljust(_LONGEST_REQUEST))
    return channel


def _check_same(own: Mapping[str, torch.Tensor], offered: list[_Entry]) -> None:
    """Raise TransferError unless a sender's tensors have the names, dtypes and shapes of `own`."""
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
    """Send the header of an offer, sealed by `channel`, then the blocks of its local tensors.

    The blocks are not sealed: each is followed by its CRC-32 only.
    """
    head = channel.seal(offer.header)
    connection.sendall(_HEAD.pack(len(head), crc32(head)) + head)
    for tensor in offer.tensors.values():
        data = bytes_of(local_tensor(tensor))
        for begin, end in blocks(len(data)):
            block = data[begin:end]
            connection.sendall(block)
            connection.sendall(_CHECKSUM.pack(crc32(block)))


def _receive_tensor(connection: socket.socket, name: str, like: torch.Tensor) -> torch.Tensor:
    """Receive a tensor of the shape of `like` into host memory, and verify every block."""
    tensor = torch.empty(like.shape, dtype=like.dtype)
    data = bytes_of(tensor)
    for begin, end in blocks(len(data)):
        _read_into(connection, data[begin:end])
        if crc32(data[begin:end]) != _CHECKSUM.unpack(_read(connection, _CHECKSUM.size))[0]:
            raise TransferError(f"{name} was damaged on the way")
    return tensor


def _read(connection: socket.socket, length: int, deadline: float = math.inf) -> bytearray:
    """Read `length` bytes; raise TransferError at the end of the connection or after `deadline`."""
    data = bytearray(length)
    _read_into(connection, memoryview(data), deadline)
    return data


def _read_into(connection: socket.socket, view: memoryview, deadline: float = math.inf) -> None:
    """Fill `view`; raise TransferError at the end of the connection or after `deadline`."""
    while view:
        if time.monotonic() > deadline:
            raise TransferError("the other side sends too slowly")
        count = connection.recv_into(view)
        if not count:
            raise TransferError("the other replica group closed the connection")
        view = view[count:]


def _dtype(tensor: torch.Tensor) -> str:
    """torch's name of a tensor's dtype, such as `float32`."""
    return str(tensor.dtype).removeprefix("torch.")
