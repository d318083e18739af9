"""The state of one process sent to another over real sockets: verified, bounded, without pickle."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from shardwise.checkpoint.dcp import transport
from shardwise.checkpoint.dcp.transport import TensorTransport, TransferError
from shardwise.checkpoint.format.checksum import BLOCK, crc32
from shardwise.pytorch.channel import CHALLENGE_BYTES

PATIENCE = timedelta(seconds=20)
LOOPBACK = "127.0.0.1"
State = dict[str, Any]


def tensors(seed: int = 0) -> State:
    chance = torch.Generator().manual_seed(seed)
    return {
        "model.weight": torch.randn(7, 5, generator=chance),
        "model.half": torch.randn(3, generator=chance).to(torch.bfloat16),
        "model.empty": torch.empty(0, 4),
        "optimizer.weight.step": torch.tensor(12.0),
        # More than one block.
        "model.long": torch.randint(0, 256, (BLOCK + 5,), generator=chance).to(torch.uint8),
    }


def offered(state: Mapping[str, Any], step: int = 12) -> dict[str, Any]:
    return {"user": {"default": state}, "torchft": {"step": step, "batches_committed": 0}}


@pytest.fixture
def sender() -> Iterator[TensorTransport]:
    made = TensorTransport(LOOPBACK, lambda _: {})
    yield made
    made.shutdown()


def receive(own: State, sender: TensorTransport, step: int = 12) -> State:
    receiver = TensorTransport(LOOPBACK, lambda _: own)
    try:
        return receiver.recv_checkpoint(0, sender.metadata(), step, PATIENCE)
    except Exception as error:
        assert receiver.failure is error
        raise
    finally:
        receiver.shutdown()


def test_every_bit_arrives_and_own_tensors_are_untouched(sender: TensorTransport) -> None:
    sent, own = tensors(0), tensors(1)
    sender.send_checkpoint([1], 12, offered(sent), PATIENCE)
    before = {name: tensor.clone() for name, tensor in own.items()}
    received = receive(own, sender)
    assert received["torchft"] == {"step": 12, "batches_committed": 0}
    for name, tensor in received["user"]["default"].items():
        assert torch.equal(tensor, sent[name])
        assert tensor.dtype == sent[name].dtype
        assert torch.equal(own[name], before[name])


def test_an_offer_may_come_after_the_request(sender: TensorTransport) -> None:
    later = threading.Timer(
        0.3, lambda: sender.send_checkpoint([1], 12, offered(tensors()), PATIENCE)
    )
    later.start()
    assert receive(tensors(1), sender)["torchft"]["step"] == 12
    later.join()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model.weight": torch.zeros(7, 6)}, "model.weight is float32 [7, 5] in the other"),
        ({"model.half": torch.zeros(3)}, "model.half is bfloat16 [3]"),
        ({"model.other": torch.zeros(1)}, "model.other is in one of the two replica groups only"),
        ({"a\x1b[2J": torch.zeros(1)}, "a�[2J is in one of the two replica groups only"),
    ],
)
def test_tensors_of_another_model_are_refused(
    sender: TensorTransport, change: State, says: str
) -> None:
    sender.send_checkpoint([1], 12, offered(tensors()), PATIENCE)
    with pytest.raises(TransferError) as refused:
        receive({**tensors(1), **change}, sender)
    assert says in str(refused.value)


class Relay:
    """A connection between two processes in which one byte changes, or the list of tensors."""

    def __init__(
        self, sender: TensorTransport, flip_at: int | None = None, forged: bytes = b""
    ) -> None:
        self._to = json.loads(sender.metadata())
        self._flip_at, self._forged = flip_at, forged
        self.request = b""
        self._listener = socket.create_server((LOOPBACK, 0))
        threading.Thread(target=self._relay, daemon=True).start()

    def metadata(self) -> str:
        return json.dumps({**self._to, "port": self._listener.getsockname()[1]})

    def _relay(self) -> None:
        near, _ = self._listener.accept()
        with near, socket.create_connection((self._to["host"], self._to["port"])) as far:
            near.sendall(far.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))
            self.request = near.recv(4096, socket.MSG_WAITALL)
            far.sendall(self.request)
            data = bytearray()
            while part := far.recv(2**20):
                data += part
            if self._flip_at is not None:
                data[self._flip_at] ^= 1
            data = bytearray(self._forged) or data
            with suppress(OSError):  # the receiver does not read on
                near.sendall(data)


@pytest.mark.parametrize("flip_at", [9, 80, 520, BLOCK // 2, -6])
def test_a_flipped_bit_is_found(sender: TensorTransport, flip_at: int) -> None:
    """In the list of tensors, in a small tensor, in the first and the last block of a long one."""
    sender.send_checkpoint([1], 12, offered(tensors()), PATIENCE)
    relay = Relay(sender, flip_at)
    receiver = TensorTransport(LOOPBACK, lambda _: tensors(1))
    with pytest.raises(TransferError, match="damaged on the way"):
        receiver.recv_checkpoint(0, relay.metadata(), 12, PATIENCE)


def answer_to(request: bytes, sender: TensorTransport) -> bytes:
    """What a stranger gets, after the random bytes that everybody gets."""
    at = json.loads(sender.metadata())
    with socket.create_connection((at["host"], at["port"])) as connection:
        assert len(connection.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
        connection.sendall(request.ljust(4096))
        return connection.recv(1)


BODY = json.dumps({"step": 12, "challenge": "0" * 32}).encode()


@pytest.mark.parametrize(
    "request_line", [b"", BODY, b"0" * 64 + b" " + BODY + b"\n", b"\xff" * 4096]
)
def test_a_request_without_the_secret_gets_nothing(
    sender: TensorTransport, request_line: bytes
) -> None:
    sender.send_checkpoint([1], 12, offered(tensors()), PATIENCE)
    assert answer_to(request_line, sender) == b""


def test_whoever_listens_learns_no_secret_and_can_repeat_no_request(
    sender: TensorTransport,
) -> None:
    sender.send_checkpoint([1], 12, offered(tensors()), PATIENCE)
    relay = Relay(sender)
    receiver = TensorTransport(LOOPBACK, lambda _: tensors(1))
    receiver.recv_checkpoint(0, relay.metadata(), 12, PATIENCE)
    assert BODY[:5] in relay.request
    assert json.loads(sender.metadata())["secret"].encode() not in relay.request
    assert answer_to(relay.request, sender) == b""


def test_a_list_of_tensors_without_the_secret_is_refused(sender: TensorTransport) -> None:
    """Made by somebody between the two, with a checksum that is right."""
    sender.send_checkpoint([1], 12, offered(tensors()), PATIENCE)
    head = b"0" * 64 + b' {"counters":{"step":12},"tensors":[]}\n'
    forged = struct.pack(">II", len(head), crc32(head)) + head
    receiver = TensorTransport(LOOPBACK, lambda _: {})
    with pytest.raises(TransferError, match="not of the other replica group"):
        receiver.recv_checkpoint(0, Relay(sender, forged=forged).metadata(), 12, PATIENCE)


def test_a_crowd_of_strangers_delays_a_request_only(
    sender: TensorTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_REQUEST_S", 1.0)
    sender.send_checkpoint([1], 12, offered(tensors()), PATIENCE)
    at, threads = json.loads(sender.metadata()), threading.active_count()
    crowd = [socket.create_connection((at["host"], at["port"])) for _ in range(150)]
    received = receive(tensors(1), sender)
    assert threading.active_count() <= threads + transport._MOST_CONNECTIONS + 1
    assert received["torchft"]["step"] == 12
    for connection in crowd:
        connection.close()


def test_it_listens_on_one_address_only(sender: TensorTransport) -> None:
    port = json.loads(sender.metadata())["port"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)


def test_after_the_offer_is_withdrawn_nothing_is_sent(sender: TensorTransport) -> None:
    sender.send_checkpoint([1], 12, offered(tensors()), timedelta(seconds=1))
    sender.disallow_checkpoint()
    with pytest.raises(TransferError, match="closed the connection"):
        receive(tensors(1), sender)
