"""Build a contribution from a run folder, field by field of its record.

Nothing is copied as a whole: a value is taken because a field of the record asks for it, and kept
because it is a number, a word of a fixed list or a version.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec

from shardwise.observe.observation import read_step_shares
from shardwise.runs.contribution.check import impossible_numbers
from shardwise.runs.contribution.record import (
    TARGETS,
    VERSION,
    AdapterShape,
    Collective,
    Contribution,
    Hardware,
    Host,
    Library,
    Machine,
    Memory,
    Shape,
    Step,
    System,
    Throughput,
    Time,
    Vendor,
    Work,
)
from shardwise.runs.record import NAME, RunRecord
from shardwise.spec import catalogue
from shardwise.spec.adapter import Adapter
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.dtype import DType
from shardwise.spec.model import ModelSpec
from shardwise.spec.read_file import read_bytes, read_json
from shardwise.spec.record import Record, SpecError
from shardwise.spec.run import RunSpec, read_run
from shardwise.spec.unequal import check_equal
from shardwise.step.profile import StepProfile, read_profile_file, without_inside

# Words in the names that devices report, by vendor.
_VENDORS: dict[Vendor, tuple[str, ...]] = {
    "nvidia": ("nvidia", "geforce", "tesla", "quadro", "rtx"),
    "amd": ("amd", "instinct", "radeon"),
    "intel": ("intel",),
    "huawei": ("ascend",),
}
_LAYOUT = re.compile(r"[a-z0-9]{1,20}")
_RELEASE = re.compile(r"[0-9]{1,4}(\.[0-9]{1,5}){1,3}")


def collect_all(path: Path) -> dict[str, Contribution]:
    """The contributions of a run folder or of a result file of `shardwise doctor`, by name.

    That of a run folder has an empty name; those of a result file are named by their layout.
    """
    if not path.is_file():
        return {"": collect(path)}
    data = _accept_file(path)
    listed = data.get("runs")
    runs = listed if isinstance(listed, list) else []
    found: dict[str, Contribution] = {}
    for number, one in enumerate(runs, 1):
        if isinstance(one, Mapping) and "contribution" in one:
            name = _name(one.get("layout"), number, found)
            contribution = Contribution.of_file(one["contribution"], f"{path}: {name}")
            _refuse_impossible(contribution, f"{path}: {name}")
            found[name] = contribution
    if not found:
        raise SpecError(
            f"contribute: {path} has no run that may be contributed; run 'shardwise doctor' on a "
            "machine that does nothing else"
        )
    return found


def _accept_file(path: Path) -> Mapping[str, Any]:
    """The content of a result file of `shardwise doctor`; raises SpecError for other files."""
    try:
        data = read_json(path, "contribute")
    except SpecError:
        data = None
    if not isinstance(data, Mapping) or data.get("kind") != "accept":
        raise SpecError(f"contribute: {path} is neither a run folder nor a file of accept")
    return data


def _name(layout: object, number: int, taken: Container[str]) -> str:
    """A name that is not in `taken`: the layout, or the number of the run."""
    if not isinstance(layout, str) or not _LAYOUT.fullmatch(layout):
        layout = str(number)
    # No layout has a dash.
    return f"{layout}-{number}" if layout in taken else layout


def _refuse_impossible(contribution: Contribution, where: str) -> None:
    """Raise SpecError if a number of the contribution is impossible."""
    problems = impossible_numbers(contribution)
    if problems:
        raise SpecError(f"{where}: {problem}" for problem in problems)


def collect(folder: Path) -> Contribution:
    """The contribution of a finished run; raises SpecError if it measured nothing usable."""
    _refuse_folder_of_runs(folder)
    run = check_equal(read_run(folder / "run.toml"), "contribute").resolved()
    predicted = read_profile_file(folder / "prediction.json")
    measured = _measured(folder)
    environment = _environment(folder)
    contribution = Contribution.read(
        {
            "hardware": _hardware(run.cluster, environment),
            "host": _host(environment),
            "model": _shape(run),
            "parameters": predicted.model.get("parameters"),
            "trained_parameters": predicted.model.get("trained_parameters"),
            "adapter": _adapter(run.adapter) if run.adapter else None,
            "job": run.job,
            "strategy": run.strategy,
            "steps": _steps(folder),
            "predicted": _step(predicted),
            "measured": _step(_with_shares(measured, folder)),
        },
        where="contribute",
    )
    _refuse_impossible(contribution, "contribute")
    return contribution


def _refuse_folder_of_runs(folder: Path) -> None:
    """Raise SpecError if the folder holds runs but is not one itself; it names one of them."""
    if not folder.is_dir() or (folder / "run.toml").exists():
        return
    inside = sorted(str(path.parent) for path in folder.glob("*/run.toml"))
    if inside:
        more = f" or another of its {len(inside)} runs" if len(inside) > 1 else ""
        raise SpecError(f"contribute: {folder} is a folder of runs; give {inside[0]}{more}")


def _measured(folder: Path) -> StepProfile:
    """The measured profile of the run; raises SpecError without a step time."""
    path = folder / "measurement.json"
    if not path.is_file():
        raise SpecError(
            f"contribute: {folder} has no measurement.json; give the folder of a finished run that "
            "trained at least 8 steps with train.measure = true"
        )
    profile = read_profile_file(path)
    if profile.time is None:
        raise SpecError(f"contribute: {path} has no step time; train at least 8 steps")
    return profile


def _steps(folder: Path) -> int:
    """The number of steps that the run has trained; raises SpecError if it still trains."""
    try:
        record = msgspec.json.decode(read_bytes(folder / NAME, "contribute"), type=RunRecord)
    except (SpecError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise SpecError(
            f"contribute: {folder / NAME} is missing or cannot be read; give a run folder"
        ) from None
    if record.state == "training":
        raise SpecError(f"contribute: the run in {folder} has not ended; wait until it has")
    return max(1, record.step)


def _environment(folder: Path) -> Mapping[str, Any]:
    """The content of environment.json; empty for older runs."""
    path = folder / "environment.json"
    data = read_json(path, "contribute") if path.exists() else {}
    return data if isinstance(data, Mapping) else {}


# ---- hardware and software ------------------------------------------------------------------


def _hardware(cluster: ClusterSpec, environment: Mapping[str, Any]) -> Hardware:
    device = cluster.device
    name = device.name if device.name in catalogue.devices() else None
    listed = environment.get("gpus")
    reported = [one for one in listed if isinstance(one, str)] if isinstance(listed, list) else []
    return Hardware(
        device=name,
        vendor=_vendor(reported) if name is None else None,
        reported=_is_reported(name, reported) if name and not device.is_cpu and reported else None,
        memory_bytes=device.capacity,
        memory_bytes_per_s=device.memory_bandwidth,
        link_bytes_per_s=device.link_bandwidth,
        peak_flops={dtype: device.peak[dtype] for dtype in get_args(DType)
                    if dtype in device.peak},
        nodes=cluster.nodes,
        devices_per_node=cluster.devices_per_node,
        network_bytes_per_s=cluster.network,
        calibrated=cluster.calibration is not None,
    )  # fmt: skip


def _vendor(reported: list[str]) -> Vendor | None:
    """The vendor of devices with these reported names; None if unknown."""
    said = " ".join(reported).lower()
    return next((name for name, words in _VENDORS.items() if any(w in said for w in words)), None)


def _is_reported(name: str, reported: list[str]) -> bool:
    """Whether every device reports the model of its catalogue name: `H100` of `H100-SXM`."""
    first, *rest = name.split("-")
    model = "".join([first, *rest[:1]]) if first == "RTX" else first
    return all(model.lower() in re.sub(r"[\s-]", "", one).lower() for one in reported)


def _host(environment: Mapping[str, Any]) -> Host:
    platform = str(environment.get("platform", ""))
    given = environment.get("versions")
    versions = given if isinstance(given, Mapping) else {}
    found = {name: _version(versions.get(name)) for name in get_args(Library)}
    machine = next((one for one in get_args(Machine) if f"-{one}-" in f"{platform}-"), None)
    return Host.read(
        {
            "system": _known_word(platform.partition("-")[0], get_args(System)),
            "machine": machine,
            "cores": _count(environment.get("cores")),
            "threads": _count(environment.get("threads")),
            "versions": {name: version for name, version in found.items() if version is not None},
        },
        where="contribute: environment.json",
    )


def _version(text: object) -> str | None:
    """A public version as it is; of other versions only the numbers at the beginning.

    None if there are none.
    """
    if not isinstance(text, str):
        return None
    if re.fullmatch(VERSION, text):
        return text
    release = _RELEASE.match(text)
    return release[0] if release else None


def _known_word(text: str, known: tuple[Any, ...]) -> Any:
    """The text if it is one of the known words, else None."""
    return text if text in known else None


def _count(value: object) -> int | None:
    """The value if it is a positive integer, else None."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value if is_count else None  # type: ignore[return-value]


# ---- model ----------------------------------------------------------------------------------


def _shape(run: RunSpec) -> Shape | None:
    """The shapes of the model; None for a model that is no ModelSpec."""
    if not isinstance(run.model, ModelSpec):
        return None
    return Shape(**{name: getattr(run.model, name) for name in Shape.model_fields})


def _adapter(adapter: Adapter) -> AdapterShape:
    known = all(target in TARGETS for target in adapter.targets)
    return AdapterShape(
        rank=adapter.rank,
        targets=adapter.targets if known else None,
        dora=adapter.dora,
        base=adapter.base,
        trains_parts=bool(adapter.train),
    )


# ---- step -----------------------------------------------------------------------------------


def _with_shares(measured: StepProfile, folder: Path) -> StepProfile:
    """The measured step with its compute and exposed communication, if the run was profiled."""
    shares = read_step_shares(folder)
    if shares is None or measured.time is None:
        return measured
    step_s = measured.time.step_s
    compute, exposed = (share * step_s for share in shares)
    return measured._replace(
        time=measured.time._replace(compute_s=compute, exposed_communication_s=exposed)
    )


def _step(profile: StepProfile) -> Step:
    """The step of a contribution, from the parts of a profile."""
    version = _version(profile.provenance.shardwise)
    if version is None:
        raise SpecError("contribute: the run does not say which version of Shardwise measured it")
    return Step(
        shardwise=version,
        memory=_record_of(Memory, profile.memory),
        traffic=tuple(_record_of(Collective, one) for one in profile.traffic),
        work=_record_of(Work, profile.work),
        time=Time.read(without_inside(profile.time)) if profile.time is not None else None,
        throughput=_record_of(Throughput, profile.throughput),
    )


def _record_of(record: type[Record], part: Any) -> Any:
    """A `record` with its fields taken from a part of a profile; None without the part."""
    if part is None:
        return None
    return record.read({name: getattr(part, name) for name in record.model_fields})
