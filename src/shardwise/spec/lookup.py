"""Find models and clusters by name, shorthand or path."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.spec import catalogue
from shardwise.spec.adapter import Adapter
from shardwise.spec.catalogue import traced
from shardwise.spec.cluster import ClusterSpec, DeviceSpec, parse_cluster
from shardwise.spec.code_name import CodeName
from shardwise.spec.hub import download_config, hub_name
from shardwise.spec.model import ModelSpec
from shardwise.spec.read_file import read_toml
from shardwise.spec.record import Record, SpecError, did_you_mean
from shardwise.spec.toml_text import toml_text

_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class ModuleRef(Record):
    """A model that only code can describe: `package.module:factory` returns an nn.Module."""

    factory: CodeName
    adapter: Adapter | None = None

    @property
    def name(self) -> str:
        """The reference itself, `package.module:factory`."""
        return self.factory


class ConfigRef(Record):
    """A Hugging Face configuration of a model type without formulas."""

    config: str
    pretrained: bool = False
    adapter: Adapter | None = None

    @property
    def name(self) -> str:
        """The name of the folder that has the configuration, or of a file with another name."""
        from shardwise.spec.huggingface import config_name

        return config_name(Path(self.config))

    @property
    def preset(self) -> str | None:
        """The model of the catalogue that this configuration belongs to; None for others."""
        return traced.name_of(Path(self.config))

    @cached_property
    def max_positions(self) -> int:
        """Most tokens of a sequence as the configuration says, else without a limit."""
        from shardwise.spec.huggingface import config_table, longest_sequence

        return longest_sequence(config_table(Path(self.config))) or sys.maxsize


Model = ModelSpec | ModuleRef | ConfigRef


def may_have_experts(model: Model) -> bool:
    """Whether a model is a mixture of experts, as far as is known before it is traced."""
    return not isinstance(model, ModelSpec) or model.experts is not None


def config_folder(config: str | Path) -> Path:
    """The folder of a model or tokenizer, given as the folder or as a JSON file in the folder."""
    path = Path(config)
    return path.parent if path.suffix == ".json" else path


def find_model(text: str, base: Path | None = None) -> Model:
    """Find a model by preset name, Hugging Face path, name on a hub, or `package.module:factory`.

    A path is a `config.json` or its folder, relative to `base`; it wins over a name on a hub. A
    preset that has that name wins over the hub, unless a revision is given. Raises SpecError if
    there is no such model.
    """
    if _FACTORY.fullmatch(text):
        return ModuleRef.read({"factory": text}, where="model")
    is_path = text.endswith(".json") or "/" in text or "\\" in text
    is_preset = text.lower() in catalogue.hub_presets() or traced.named(text) is not None
    if (text and _exists((base or Path()) / text)) or (is_path and not is_preset):
        return find_config(text, base)
    return find_preset(text)


def find_preset(name: str) -> ModelSpec | ConfigRef:
    """The model of the catalogue called `name`, or so on a hub; SpecError if there is none."""
    kept = traced.named(name)
    if kept is None:
        return catalogue.model(name)
    return ConfigRef(config=str(traced.config_file(kept)))


def find_config(text: str, base: Path | None = None) -> ModelSpec | ConfigRef:
    """Read a Hugging Face configuration: a ModelSpec if formulas exist, else a ConfigRef.

    `text` is a `config.json` or its folder, relative to `base`, or else a name on a hub.
    """
    from shardwise.spec.huggingface import (
        UnknownFamilyError,
        config_table,
        is_multimodal,
        read_config,
        warn_of_unused,
    )

    # Absolute, so that a copy of the run.toml in another folder finds the file too.
    path = _config_path(text, base)
    table = config_table(path)
    # The formulas know the text part of a multimodal model; a trace counts the others too.
    if not (is_multimodal(table) and find_spec("torch") and find_spec("transformers")):
        with suppress(UnknownFamilyError):
            return read_config(path).but(config=str(path))
    if table.get("model_type") is None and not table.get("architectures"):
        raise SpecError("model: model_type is missing from the configuration")
    warn_of_unused(table, text_only=False)
    return ConfigRef(config=str(path))


def _config_path(text: str, base: Path | None) -> Path:
    """The absolute path of a configuration, from a path relative to `base` or a name on a hub."""
    path = (base or Path()) / text
    if _exists(path):
        return path.resolve()
    name = hub_name(text)
    near = did_you_mean(name.model if name else text[:200], catalogue.all_model_names())
    if name is not None:
        return download_config(name, near).resolve()
    raise SpecError(
        f"model: no file or folder {text[:200]!r}; give a folder with its config.json, a name on a "
        f"hub such as Qwen/Qwen3-8B, or a preset of 'shardwise catalog models'{near}"
    )


def find_cluster(text: str, base: Path | None = None) -> ClusterSpec:
    """Find a cluster by shorthand or by TOML file, relative to `base`.

    Shorthands are `4x8xH100-SXM@400Gbps` and `4xp5.48xlarge`; `+` joins parts of unequal devices.
    """
    if "+" in text:
        from shardwise.spec.cluster_parts import parse_parts

        return parse_parts(text, lambda part: find_cluster(part, base))
    if text.endswith(".toml"):
        path = (base or Path()) / text
        data = read_toml(path, "cluster")
        section = data.get("cluster", data)
        if isinstance(section, str):
            return find_cluster(section, path.parent)
        return cluster_from_table(section, path.name)
    return parse_cluster(text, catalogue.find_hardware)


class Lookup(NamedTuple):
    """The functions that read a model and a cluster from text."""

    model: Callable[[str], Model]
    cluster: Callable[[str], ClusterSpec]


# Reads names, shorthands and files.
DISK_LOOKUP = Lookup(find_model, find_cluster)


def cluster_from_table(table: dict[str, Any], where: str = "cluster") -> ClusterSpec:
    """A cluster from a TOML table, whose device is a name or a table.

    An instance sets what is left out.
    """
    table = {**_of_instance(table.get("instance"), where), **table}
    if "parts" in table:
        from shardwise.spec.cluster_parts import with_parts

        table = with_parts(table, catalogue.find_device)
    device = table.get("device")
    if isinstance(device, str):
        try:
            table = {**table, "device": catalogue.find_device(device)}
        except SpecError as error:
            raise SpecError(f"{where}.device: {error}") from None
    return ClusterSpec.read(table, where=where)


def _of_instance(name: object, where: str) -> dict[str, Any]:
    """Device, devices per node and network of an instance; empty without a name."""
    if not isinstance(name, str):
        return {}
    found = parse_cluster(name, catalogue.find_hardware)
    if found.instance is None:
        raise SpecError(f"{where}.instance: {name[:60]!r} is a device; name it in {where}.device")
    kept = ("device", "devices_per_node", "network")
    return {key: getattr(found, key) for key in kept if getattr(found, key) is not None}


def write_cluster(cluster: ClusterSpec) -> str:
    """TOML that `find_cluster` reads back to an equal cluster."""
    return toml_text(cluster_table(cluster))


def cluster_table(cluster: ClusterSpec) -> dict[str, Any]:
    """A cluster as a TOML table; a device of the catalogue is written as its name."""
    table = cluster.model_dump(mode="json", exclude_none=True)
    _name_device(table, cluster.device)
    for written, part in zip(table.get("parts", ()), cluster.parts or (), strict=True):
        _name_device(written, part.device)
    return table


def _name_device(table: dict[str, Any], device: DeviceSpec) -> None:
    """Write a device of the catalogue, or of this machine, as its name."""
    is_here = device.source.get("memory") == catalogue.HERE
    if is_here or catalogue.devices().get(device.name) == device:
        table["device"] = device.name


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name no file system accepts
        return False
