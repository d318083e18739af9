"""Find the configuration of a model by its name on a hub, such as `Qwen/Qwen3-8B`.

The client is huggingface_hub: its cache and its variables (HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE,
HF_HOME) hold. The config.json is all that is ever downloaded; neither weights nor code are.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from shardwise.spec.foreign_text import cut
from shardwise.spec.record import SpecError

# Most bytes of a config.json.
LARGEST_CONFIG_BYTES = 16 * 2**20
_FILE = "config.json"
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
# A name and its revision; regular expressions of Python and of JavaScript read it alike.
PATTERN = rf"({_PART}/{_PART})(?:@({_PART}(?:/{_PART})*))?"
_NAME = re.compile(PATTERN)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LONGEST_NAME = 96
# What names end in that are files, or that hubs do not have.
_NO_NAMES = (".json", ".toml", ".yaml", ".yml", ".py", ".git")
# Variables with which users tell the client whether to stay offline.
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
# Set by `stay_offline`, where the user had not asked to stay offline.
_CLOSED_BY_US = Event()


class HubName(NamedTuple):
    """A model on a hub: `owner/name`, and the branch, tag or commit if one is given."""

    model: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.model}@{self.revision}" if self.revision else self.model


def hub_name(text: str) -> HubName | None:
    """The name on a hub in `owner/name` or `owner/name@revision`; None for other texts.

    Paths such as `../a/b`, `a/b/c` or `a/config.json` are no names.
    """
    found = _NAME.fullmatch(text[: 4 * _LONGEST_NAME])
    if found is None or ".." in text or "--" in found[1] or found[1].endswith(_NO_NAMES):
        return None
    longest = max(len(found[1]), len(found[2] or ""))
    return HubName(found[1], found[2]) if longest <= _LONGEST_NAME else None


def folder_name(folder: Path) -> str:
    """The name of the model in a folder: that of the model for a snapshot of the hub's cache."""
    return _cached_model(folder).rpartition("/")[2] or folder.name


def _cached_model(folder: Path) -> str:
    """The `owner/name` of a snapshot of the hub's cache; empty for any other folder."""
    kind, *names = folder.parent.parent.name.split("--")
    return "/".join(names) if (kind, folder.parent.name) == ("models", "snapshots") else ""


def model_without_weights(folder: Path) -> str:
    """The `owner/name` of a snapshot of the hub's cache that has no weights; else empty."""
    model = _cached_model(folder)
    return "" if model and any(folder.glob("model*.safetensors")) else model


def check_weights(folder: Path) -> None:
    """Raise SpecError for a snapshot of the hub's cache that has no weights."""
    model = model_without_weights(folder)
    if model:
        raise SpecError(
            f"model.pretrained: weights are not downloaded; run 'hf download {model}' first"
        )


def download_config(name: HubName, hint: str = "") -> Path:
    """The folder of the hub's cache that holds a model's config.json, which is downloaded if newer.

    A hub that cannot be reached or refuses is asked for nothing that the cache has. Raises
    SpecError with one sentence on what to do, or on names that the user may have meant, in `hint`.
    """
    try:
        from huggingface_hub import try_to_load_from_cache
    except ModuleNotFoundError:
        raise SpecError(
            f"model: no file or folder {str(name)!r}; to look it up on the hub, install "
            f'huggingface_hub, as pip install "shardwise[hf]" does{hint}'
        ) from None
    cached = try_to_load_from_cache(name.model, _FILE, revision=name.revision)
    # What a commit holds never changes.
    if isinstance(cached, str) and name.revision and _COMMIT.fullmatch(name.revision):
        return Path(cached).parent
    try:
        with _as_user_asked():
            return Path(_downloaded(name)).parent
    except SpecError:
        raise
    # The client passes on errors of its HTTP library, its token store and the file system.
    except Exception as error:
        if isinstance(cached, str):
            return Path(cached).parent
        raise SpecError(f"model: {_reason(name, error, hint)}") from None


def _downloaded(name: HubName) -> str:
    """The path of a model's config.json in the cache, fetched if the hub has another one."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    # Asked first, so that nothing large is begun and a hub out of reach is not asked again.
    known = get_hf_file_metadata(hf_hub_url(name.model, _FILE, revision=name.revision))
    if known.commit_hash is None or known.etag is None:
        raise SpecError(
            f"model: {_endpoint()} does not answer as a hub does; check HF_ENDPOINT, and whether "
            "the network asks you to log in"
        )
    if known.size is not None and known.size > LARGEST_CONFIG_BYTES:
        raise _too_large(name)
    bar = _counting_bar(name)
    return hf_hub_download(name.model, _FILE, revision=name.revision, tqdm_class=bar)


def _counting_bar(name: HubName) -> type[Any]:
    """A progress bar that shows nothing and ends a download at the limit of a config.json."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Counting(tqdm):
        """Counts the bytes that arrived; SpecError above the limit."""

        received = 0.0

        def __init__(self, *words: Any, **given: Any) -> None:
            super().__init__(*words, **{**given, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            self.received += n or 0
            if self.received > LARGEST_CONFIG_BYTES:
                raise _too_large(name)
            shown: bool | None = super().update(n)
            return shown

    return Counting


def _too_large(name: HubName) -> SpecError:
    return SpecError(
        f"model: the config.json of {name} is too large: over {LARGEST_CONFIG_BYTES:,} bytes"
    )


def _reason(name: HubName, error: Exception, hint: str) -> str:
    """Why a model's config.json is not there, and what to do."""
    from huggingface_hub import errors

    where, model, status = _endpoint(), name.model, _status(error)
    if isinstance(error, errors.OfflineModeIsEnabled):
        told = (
            f"{name} is not in the cache of the hub, and HF_HUB_OFFLINE is set; unset it, or give "
            "a folder with its config.json"
        )
    elif isinstance(error, errors.GatedRepoError) or status == 403:
        told = (
            f"{model} is gated; accept its licence at {where}/{model}, then set HF_TOKEN to a "
            "token of that account or run 'hf auth login'"
        )
    elif isinstance(error, errors.RevisionNotFoundError):
        told = f"{model} has no revision {name.revision!r} on {where}; see {where}/{model}/branches"
    elif isinstance(error, errors.RemoteEntryNotFoundError):
        told = (
            f"{name} has no config.json on {where}, so transformers cannot build it; give --model "
            "package.module:factory, a function that returns the nn.Module"
        )
    elif isinstance(error, errors.RepositoryNotFoundError):
        told = (
            f"there is no model {model!r} on {where} and no folder of that name; check the "
            "spelling, or set HF_TOKEN if the model is private"
        )
    elif status == 401:
        told = f"{where} does not accept the token; set HF_TOKEN anew, or unset it"
    elif status is not None:
        told = f"{where} answered with status {status} for {name}; try again later"
    else:
        why = cut(str(error), 120) or type(error).__name__
        told = (
            f"cannot look up {name} on {where} ({why}); check the network, or give a folder with "
            "its config.json"
        )
    return f"{told}{hint}"


def _status(error: Exception) -> int | None:
    """The status with which the hub answered; None if it did not."""
    response = getattr(error, "response", None)
    return getattr(response, "status_code", None)


def _endpoint() -> str:
    """The address of the hub: HF_ENDPOINT, else huggingface.co."""
    from huggingface_hub import constants

    return constants.ENDPOINT


def stay_offline() -> None:
    """Let libraries of Hugging Face download nothing from now on, neither weights nor kernels.

    A run names all files that it needs. Where the user set a variable for it, its value holds.
    """
    if any(variable in os.environ for variable in _OFFLINE):
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    # The client reads the variable when it is imported, which a lookup may have done before.
    client = sys.modules.get("huggingface_hub.constants")
    if client is not None:
        client.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    _CLOSED_BY_US.set()


@contextmanager
def _as_user_asked() -> Iterator[None]:
    """Inside, the client is offline only if the user asked for it, not by `stay_offline`."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    if _CLOSED_BY_US.is_set():
        constants.HF_HUB_OFFLINE = False
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
