"""Read a JSON file that others wrote: every fault is one SpecError, and no key comes twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.spec.record import SpecError
from shardwise.spec.unique_keys import KeyTwiceError, unique_keys


def read_json(path: Path, where: str) -> Any:
    """The content of a file; raise a SpecError that begins with `where`."""
    try:
        text = path.read_bytes().decode("utf-8")
        return json.loads(text, object_pairs_hook=unique_keys)
    except OSError as error:
        raise SpecError(f"{where}: cannot be read: {error.strerror or error}") from None
    except KeyTwiceError as error:
        raise SpecError(f"{where}: {error}") from None
    except RecursionError:
        raise SpecError(f"{where}: is not valid JSON: it is nested too deeply") from None
    except ValueError as error:
        # Its first line: a message may quote the text.
        reason = str(error).partition("\n")[0][:120]
        raise SpecError(f"{where}: is not valid JSON: {reason}") from None
