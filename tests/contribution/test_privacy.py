"""No text of a user survives in a contribution, wherever it stands in a run folder."""

from __future__ import annotations

import copy
import json
import re
import string
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from shardwise.runs.contribution.collect import collect
from shardwise.runs.contribution.record import VERSION, Contribution
from shardwise.runs.record import NAME
from shardwise.spec import catalogue
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec, run_from_dict
from tests.command import shardwise
from tests.contribution.folders import run_of, write_folder
from tests.examples import examples

MARKER = "Kq7markerZx9"
# Keys and indices that lead to a text.
Route = tuple[Any, ...]
OWN_DEVICE = {
    "device": {
        "name": "our-gpu", "title": "Our own", "memory": "24GiB", "memory_bandwidth": "1TB/s",
        "link": "our link", "link_bandwidth": "20GB/s", "peak": {"bf16": "100TFLOPS"},
        "source": {"peak": "our lab"},
    },
    "nodes": 1,
    "devices_per_node": 1,
}  # fmt: skip
LLAMA = {
    "name": "ours", "family": "llama", "layers": 2, "hidden": 64, "heads": 4, "ffn": 128,
    "vocab": 256, "source": "our wiki", "config": "/home/us/config.json",
}  # fmt: skip
CHECKPOINT = {"checkpoint": {"to": "s3://ours"}, "metrics": {"textfile": "ours.prom"}}


@cache
def runs() -> dict[str, RunSpec]:
    named = run_of(model=LLAMA)
    assert named.train is not None
    return {
        "named": named._replace(train=named.train.but(**CHECKPOINT)),
        "own device": run_of(cluster=OWN_DEVICE, model=LLAMA),
        "factory": run_of(model="package.module:factory"),
        "adapter": run_of(model=LLAMA, adapter={"rank": 8, "targets": ["q_proj"]}),
        "parts": run_of(model=LLAMA, adapter={"rank": 8, "train": ["embed"]}),
    }


# ---- marking --------------------------------------------------------------------------------


def texts(value: Any, path: Route = ()) -> Iterator[Route]:
    """The paths of all texts inside a value."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from texts(part, (*path, key))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from texts(part, (*path, index))
    elif isinstance(value, str):
        yield path


def changed_at(content: Any, paths: Iterable[Route], put: Callable[[str], str]) -> Any:
    content = copy.deepcopy(content)
    for path in paths:
        part = content
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = put(part[path[-1]])
    return content


def is_read(reads: Callable[[Any], object], content: Any) -> bool:
    try:
        reads(copy.deepcopy(content))
    except SpecError:
        return False
    return True


# Texts that take a marker, by kind of run and file.
_MARKABLE: dict[tuple[str, str], list[Route]] = {}


def marked(
    content: Any, put: Callable[[str], str], reads: Callable[[Any], object], file: tuple[str, str]
) -> tuple[Any, list[Route]]:
    """The content with a marker in every text where a contribution is still made, and these texts.

    Where it is refused, nothing would be written: words of fixed lists stay.
    """
    known = _MARKABLE.get(file)
    if known is not None:
        together = changed_at(content, known, put)
        if is_read(reads, together):
            return together, known
    found = []
    for path in list(texts(content)):
        changed = changed_at(content, [path], put)
        if is_read(reads, changed):
            content = changed
            found.append(path)
    _MARKABLE.setdefault(file, found)
    return content, found


def mark_folder(folder: Path, put: Callable[[str], str], kind: str) -> list[str]:
    """Mark every file of a run folder; return the places that took the marker."""
    run = tomllib.loads((folder / "run.toml").read_text())
    run, paths = marked(run, put, lambda data: run_from_dict(data).resolved(), (kind, "run.toml"))
    (folder / "run.toml").write_text(tomli_w.dumps(run))
    found = [".".join(map(str, path)) for path in paths]
    for name in ("prediction.json", "measurement.json", "environment.json", NAME):

        def collected(data: Any, file: Path = folder / name) -> None:
            file.write_text(json.dumps(data))
            collect(folder)

        data, paths = marked(json.loads((folder / name).read_text()), put, collected, (kind, name))
        # Keys that nobody knows, as a later version or a user may add them.
        data[put("more")] = {put("key"): put("value")}
        (folder / name).write_text(json.dumps(data))
        found += [f"{name}:{'.'.join(map(str, path))}" for path in paths]
    return found


# ---- what survives --------------------------------------------------------------------------


# Some of the texts that must have taken the marker.
ALWAYS = {"data.path.0", "train.folder", f"{NAME}:name", "environment.json:host"}
PLACES = {
    "named": {"model.name", "model.config", "train.checkpoint.to", "train.metrics.textfile"},
    "own device": {"cluster.device.name", "cluster.device.link", "cluster.device.source.peak"},
    "factory": {"model.factory"},
    "adapter": {"adapter.targets.0"},
    "parts": {"adapter.train.0"},
}


@pytest.mark.parametrize("kind", list(PLACES))
def test_a_marker_in_every_text_of_a_folder_is_not_in_the_file(kind: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / MARKER, runs()[kind])
    # A factory must have the form of one.
    marker = f"{MARKER}:{MARKER}" if kind == "factory" else MARKER
    places = mark_folder(folder, lambda text: marker, kind)
    assert ALWAYS | PLACES[kind] <= set(places)
    assert len(places) > 40
    assert MARKER.lower() not in json.dumps(collect(folder).to_dict()).lower()


@cache
def honest() -> str:
    """Everything that contributions of these runs say when nothing is marked."""
    with tempfile.TemporaryDirectory() as place:
        folders = [write_folder(Path(place) / str(n), run) for n, run in enumerate(runs().values())]
        records = [json.dumps(collect(folder).to_dict()) for folder in folders]
    return " ".join([*records, *catalogue.devices()])


words = st.text(string.ascii_letters + string.digits + " ._-+/:@'é", min_size=6, max_size=30)


@examples(40)
@given(
    marker=words.filter(lambda text: text not in honest() and not re.fullmatch(VERSION, text)),
    how=st.sampled_from(["replace", "before", "after"]),
    kind=st.sampled_from(list(runs())),
)
def test_no_text_survives(marker: str, how: str, kind: str) -> None:
    def put(text: str) -> str:
        return {"replace": marker, "before": marker + text, "after": text + marker}[how]

    with tempfile.TemporaryDirectory() as place:
        folder = write_folder(Path(place) / "run", runs()[kind])
        assert mark_folder(folder, put, kind)
        try:
            found = collect(folder)
        except SpecError:
            return  # refused: nothing is written
    assert marker not in json.dumps(found.to_dict(), ensure_ascii=False)


@given(text=st.text() | st.from_regex(VERSION) | st.from_regex(r"2\.13\.0\+[a-z]{1,9}"))
def test_of_a_version_only_public_numbers_stay(text: str) -> None:
    from shardwise.runs.contribution.collect import _version

    found = _version(text)
    assert found is None or re.fullmatch(VERSION, found)
    assert found is None or text.startswith(found)


def test_every_text_of_the_record_is_a_word_of_a_list_or_a_version() -> None:
    """By its JSON schema: a field of free text could not be added unseen."""
    count = 0

    def walk(schema: Any) -> None:
        nonlocal count
        if isinstance(schema, dict):
            if schema.get("type") == "string":
                count += 1
                assert {"enum", "const", "pattern"} & set(schema), schema
            if schema.get("type") == "object":
                # Either fixed keys, or keys of a list.
                keys = schema.get("propertyNames", {})
                assert schema.get("additionalProperties") is False or "enum" in keys, schema
            for part in schema.values():
                walk(part)
        elif isinstance(schema, list):
            for part in schema:
                walk(part)

    walk(Contribution.model_json_schema())
    assert count > 20


def test_environment_folder_and_host_are_not_in_the_file(tmp_path: Path) -> None:
    place = tmp_path / MARKER
    folder = write_folder(place / "runs" / MARKER, runs()["named"])
    done = shardwise(
        "contribute", str(folder), "-o", str(place / f"{MARKER}.json"), "--yes",
        folder=place, HOSTNAME=MARKER, USER=MARKER, WANDB_PROJECT=MARKER, NCCL_ALGO=MARKER,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert MARKER.encode() not in (place / f"{MARKER}.json").read_bytes()
    assert MARKER not in done.stdout
