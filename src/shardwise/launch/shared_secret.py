"""Read or create the secret that the hosts of a run share.

Whoever knows the address of a rendezvous and the ID of a run can connect. Only a holder of the
secret can take part, and only a server that holds it is believed.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import stat
import tempfile
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

from shardwise.pytorch.channel import Secret
from shardwise.spec.read_file import open_regular
from shardwise.spec.record import SpecError
from shardwise.spec.train import SECRET_VARIABLE

# The secret itself, or a file that holds it and that nobody else can read.
VARIABLE, FILE = SECRET_VARIABLE, f"{SECRET_VARIABLE}_FILE"
_LEAST, _LONGEST = 32, 4096
_INSTRUCTIONS = (
    f"on all hosts of the run, set {VARIABLE} to the same {_LEAST} or more random characters, or "
    f"{FILE} to a file that holds them, for example of: (umask 077; head -c 32 /dev/urandom | "
    "base64 > secret)"
)


def take_secret(environment: MutableMapping[str, str]) -> Secret | None:
    """The secret that the environment holds or names; None if it has none.

    Removes it from the environment, so that processes started later do not inherit it.
    """
    text, file = environment.pop(VARIABLE, None), environment.pop(FILE, None)
    if text is not None and file is not None:
        raise SpecError(f"{VARIABLE}: {FILE} is set too; unset one of them")
    if file is not None:
        return _secret(_read_private(Path(file)), FILE)
    return None if text is None else _secret(text, VARIABLE)


def secret_for(server: tuple[str, int], given: Secret | None) -> Secret:
    """The secret for the rendezvous at `server`: `given`, or on the loopback the user's own.

    Raises SpecError if there is none and `server` is not on the loopback.
    """
    if given is not None:
        return given
    if not _is_loopback(server[0]):
        raise SpecError(
            f"{VARIABLE}: hosts that meet at {server[0]} need a secret; {_INSTRUCTIONS}"
        )
    return _secret_of_user()


def _secret(text: str, setting: str) -> Secret:
    """A Secret of this text; raises SpecError, which names the setting, for a wrong length."""
    text = text.strip()
    if not _LEAST <= len(text) <= _LONGEST:
        raise SpecError(
            f"{setting}: must hold {_LEAST} to {_LONGEST:,} characters; {_INSTRUCTIONS}"
        )
    return Secret(text)


def _read_private(path: Path) -> str:
    """The text of a file that nobody but its owner may read; raises SpecError otherwise."""
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise SpecError(f"{FILE}: others can read {path}; run chmod 600 {path}")
            return file.read(_LONGEST + 1).decode("ascii")
    except (OSError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        why = error.strerror if isinstance(error, OSError) else "it holds more than plain text"
        raise SpecError(f"{FILE}: cannot read {path} ({why})") from None


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _secret_of_user() -> Secret:
    """The secret in a private folder of this user on this machine, created at its first use."""
    folder = Path(tempfile.gettempdir(), f"shardwise-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    private = stat.S_ISDIR(found.st_mode) and not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    if found.st_uid != os.getuid() or not private:
        raise SpecError(
            f"{VARIABLE}: {folder} is not a private folder of this user; {_INSTRUCTIONS}"
        )
    path = folder / "rendezvous-secret"
    if not path.exists():
        # Complete before others see it, and never replaced.
        handle, unfinished = tempfile.mkstemp(dir=folder)
        with open(handle, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
        with suppress(FileExistsError):
            os.link(unfinished, path)
        os.unlink(unfinished)
    return _secret(_read_private(path), FILE)
