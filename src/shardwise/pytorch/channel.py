"""Messages that only holders of a secret can create, on a connection without encryption.

The secret never leaves a process: each connection derives keys from it and from random bytes of
both sides, and a code over every message (HMAC-SHA256) covers its direction and its number. So a
message can be neither forged, changed, repeated, left out nor sent back.
"""

from __future__ import annotations

import hmac

_CODE = 64  # hexadecimal digits of SHA256
CHALLENGE_BYTES = 16


class ForgedError(ValueError):
    """A message was not sealed by a holder of the secret, or is not the next one."""


class Secret:
    """Random text that both sides know; never printed, never sent by a channel."""

    def __init__(self, text: str) -> None:
        self._key = text.encode()

    def channel(self, challenge: bytes, hello: bytes, *, serves: bool) -> Channel:
        """One side of a connection: that of the server if it `serves`, else that of the client.

        `challenge` are the random bytes of the server (CHALLENGE_BYTES), `hello` is the first
        message of the client, with its own.
        """
        session = hmac.digest(self._key, b"shardwise rendezvous 1" + challenge + hello, "sha256")
        up, down = (hmac.digest(session, way, "sha256") for way in (b"up", b"down"))
        return Channel(down, up) if serves else Channel(up, down)


class Channel:
    """Seals the messages of one side of a connection, and opens those of the other."""

    def __init__(self, sealing: bytes, opening: bytes) -> None:
        self._sealing, self._opening = sealing, opening
        self._sealed = self._opened = 0

    def seal(self, body: bytes) -> bytes:
        """The line that carries the next message, with its code."""
        code = _code(self._sealing, self._sealed, body)
        self._sealed += 1
        return b"%s %s\n" % (code, body)

    def open(self, line: bytes) -> bytes:
        """The message in a line; raises ForgedError unless it is the next one of the other side."""
        code, _, body = line.rstrip(b"\n").partition(b" ")
        if not hmac.compare_digest(code, _code(self._opening, self._opened, body)):
            raise ForgedError("a message was forged or repeated")
        self._opened += 1
        return body


def body_of(line: bytes) -> bytes:
    """The message in a sealed line, not verified."""
    return line.rstrip(b"\n")[_CODE + 1 :]


def _code(key: bytes, number: int, body: bytes) -> bytes:
    """The code of message number `number`, in hexadecimal."""
    return hmac.digest(key, number.to_bytes(8, "big") + body, "sha256").hex().encode()
