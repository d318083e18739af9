"""Addresses of a rendezvous: where the hosts of a run meet, and how others reach this one."""

from __future__ import annotations

import os
import socket
import time

from shardwise.spec.record import SpecError
from shardwise.spec.train import RestartSettings

DEFAULT_PORT = 29400
DEFAULT_ENDPOINT = f"127.0.0.1:{DEFAULT_PORT}"


def endpoint() -> tuple[str, int]:
    """Address and port where the hosts meet, from the variables that torchrun reads."""
    backend = os.environ.get("PET_RDZV_BACKEND", "c10d")
    if backend not in ("c10d", "shardwise"):
        raise SpecError(f"PET_RDZV_BACKEND: {backend!r} is not supported; unset it")
    return parse_endpoint(os.environ.get("PET_RDZV_ENDPOINT", DEFAULT_ENDPOINT))


def parse_endpoint(text: str) -> tuple[str, int]:
    """Parse an address with or without a port; by default the port that torchrun would use."""
    host, _, port = text.rpartition(":") if ":" in text else (text, ":", str(DEFAULT_PORT))
    if not port.isdigit() or not host:
        raise SpecError(f"rendezvous: {text!r} is not an address such as 10.0.0.1:29400")
    return host.strip("[]"), int(port)


def own_address(
    server: tuple[str, int], patience_s: float, setting: str = "PET_RDZV_ENDPOINT"
) -> str:
    """The address by which other hosts reach this one: that of its route to the server.

    PET_LOCAL_ADDR overrides it, as for torchrun. Waits at most `patience_s` seconds for a route.
    `setting` is the one that names the server, for the error message.
    """
    given = os.environ.get("PET_LOCAL_ADDR")
    if given:
        return given
    deadline = time.monotonic() + patience_s
    while True:
        try:
            found = socket.getaddrinfo(*server, type=socket.SOCK_DGRAM)[0]
            with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
                probe.connect(found[4])
                address = str(probe.getsockname()[0])
        except OSError as error:
            if time.monotonic() > deadline:
                raise SpecError(
                    f"{setting}: {server[0]} has no route from this host ({error})"
                ) from None
            time.sleep(0.5)
            continue
        literal = server[0] == "localhost" or server[0].startswith("127.")
        return socket.gethostname() if address.startswith("127.") and not literal else address


def replica_address(settings: RestartSettings) -> str:
    """The address by which other replica groups reach this one: that of its route to torchft."""
    server = parse_endpoint(settings.lighthouse or "")
    return own_address(server, settings.join_s, "train.restart.lighthouse")


def bind_address(address: tuple[str, int]) -> tuple[str, int]:
    """The address and port on which to listen for connections to `address`.

    Some hosts resolve their own name to the loopback, which no other host can reach.
    """
    found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][4]
    numeric = str(found[0])
    named = address[0] not in ("localhost", numeric)
    return ("" if named and numeric.startswith("127.") else numeric, address[1])
