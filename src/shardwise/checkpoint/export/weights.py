"""Export the weights of a checkpoint as a Hugging Face folder, tensor by tensor.

Only one tensor is in memory at a time. The index of the checkpoint gives the size of every file,
so its header is written first. Adapters, which are small, and merged models are held in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from shardwise.checkpoint.dcp import state
from shardwise.checkpoint.dcp.raw import bytes_of
from shardwise.checkpoint.dcp.reader import CorruptError
from shardwise.checkpoint.export.adapter import Rebuild, merged_model, write_adapter, write_merged
from shardwise.checkpoint.export.config import check_folder, model_of, write_config
from shardwise.checkpoint.export.tensor_reader import TensorReader
from shardwise.checkpoint.foreign.safetensors import INDEX, SUFFIX
from shardwise.checkpoint.format.folder import Folder
from shardwise.checkpoint.format.paths import UntrustedError
from shardwise.checkpoint.format.pieces import DTYPES, Part, Tensor
from shardwise.checkpoint.format.shard import safetensors_header
from shardwise.checkpoint.format.synced import SyncedFile, atomic_folder, write_synced
from shardwise.checkpoint.verify.findings import Progress
from shardwise.checkpoint.verify.opened import Checkpoint, open_checkpoint
from shardwise.spec.adapter import Adapter
from shardwise.spec.dtype import TORCH_NAMES, DType
from shardwise.spec.lookup import Model, ModuleRef
from shardwise.spec.record import SpecError
from shardwise.units.module import TORCH_DTYPES

# The file name that transformers expects.
_NAME = "model"
# Dtypes that are converted; others, such as integer counts, are kept.
_FLOAT_DTYPES = tuple(TORCH_NAMES.values())
_PREFIX = f"{state.MODEL}."
# Elements converted at a time.
_CHUNK = 2**22


class ExportedWeights(NamedTuple):
    """Step, folder, size and files of an export, and notes for the user."""

    step: int
    folder: str
    # Bytes of tensors, without headers.
    bytes: int
    tensors: int
    dtypes: tuple[str, ...]
    # Files of weights, in order.
    files: tuple[str, ...]
    # Why there is no config.json; empty if there is one.
    no_config: str
    # Newer checkpoints that are corrupt, each with its reason.
    skipped: tuple[str, ...] = ()
    # Adapters in PEFT's format, which belong on their base model.
    adapter: bool = False
    # Sentence on the base of a run with quantised weights; empty for other runs.
    base: str = ""


class NotExportedError(Exception):
    """No requested checkpoint is intact; `problems` has one sentence per checkpoint."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(problems))


def check_target(to: Path) -> None:
    """Raise SpecError unless `to` can be created or is an empty folder."""
    if not to.parent.is_dir():
        raise SpecError(f"--output: the folder {to.parent} does not exist; create it first")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise SpecError(f"--output: {to} is not empty; use a new folder")


def export_first(
    folders: Sequence[Folder],
    to: Path,
    dtype: DType | None = None,
    shard_size: int = 5 * 10**9,
    progress: Progress = lambda _: None,
    rebuild: Rebuild | None = None,
) -> ExportedWeights:
    """Export the first intact checkpoint to a new folder; `dtype` None keeps the saved dtypes.

    For an adapted model, export its adapters in PEFT's format or, with `rebuild`, which builds the
    base, the merged model. The folder appears once it is complete on disk. Raises
    NotExportedError if no checkpoint is intact.
    """
    to = to.resolve()
    check_target(to)
    skipped: list[str] = []
    for folder in folders:
        try:
            exported = _export(folder, to, dtype, shard_size, progress, rebuild)
        except (UntrustedError, CorruptError) as error:
            skipped.append(f"{folder.url.rstrip('/').rpartition('/')[2]}: {error}")
        else:
            return exported._replace(skipped=tuple(skipped))
    raise NotExportedError(skipped)


def _export(
    folder: Folder,
    to: Path,
    dtype: DType | None,
    shard_size: int,
    progress: Progress,
    rebuild: Rebuild | None,
) -> ExportedWeights:
    """Export one checkpoint to `to`; raise UntrustedError or CorruptError if it is not intact."""
    try:
        checkpoint = open_checkpoint(folder)
    except OSError as error:
        raise UntrustedError(f"cannot be read: {error.strerror or error}") from None
    manifest, saved = checkpoint.manifest, checkpoint.tensors
    model = model_of(manifest)
    if model is not None and model.adapter is not None:
        with TensorReader(checkpoint) as reader:
            adapted = _AdaptedCheckpoint(checkpoint, reader, model, model.adapter)
            return _export_adapted(adapted, to, dtype, shard_size, rebuild)
    if rebuild is not None:
        raise SpecError("--merge: the run has no adapters; leave it out")
    parts = parts_of(saved, dtype)
    if not parts:
        raise UntrustedError("contains no weights")
    shards = shards_of(parts, shard_size)
    dtypes = tuple(sorted({part.dtype for part in parts}))
    with atomic_folder(to) as unfinished:
        # First, since it is quick and may raise SpecError.
        no_config = write_config(unfinished, model, saved, _main_dtype(parts))
        with TensorReader(checkpoint) as reader:
            for name, shard in shards.items():
                _write_shard(unfinished / name, shard, reader, progress)
        if len(shards) > 1:
            write_synced(unfinished / f"{_NAME}{INDEX}", _index(shards))
    size = sum(part.length for part in parts)
    files = tuple(shards)
    return ExportedWeights(manifest.step, str(to), size, len(parts), dtypes, files, no_config)


class _AdaptedCheckpoint(NamedTuple):
    """An opened checkpoint of an adapted model."""

    checkpoint: Checkpoint
    reader: TensorReader
    model: Model
    adapter: Adapter


def _export_adapted(
    adapted: _AdaptedCheckpoint,
    to: Path,
    dtype: DType | None,
    shard_size: int,
    rebuild: Rebuild | None,
) -> ExportedWeights:
    """Export adapters, or with `rebuild` the merged model."""
    checkpoint, reader, model, adapter = adapted
    manifest, saved = checkpoint.manifest, checkpoint.tensors
    check_folder(model)
    if adapter.rank is None and rebuild is None:
        raise SpecError("export-weights: the run trains parameters in full, not LoRA; use --merge")
    with atomic_folder(to) as unfinished:
        if rebuild is None:
            wanted = None if dtype is None else TORCH_DTYPES[dtype]
            tensors: Mapping[str, torch.Tensor] = write_adapter(
                unfinished, model, saved, reader, wanted
            )
        else:
            module = merged_model(manifest, model, reader, rebuild)
            write_merged(unfinished, module, TORCH_DTYPES[dtype or adapter.float_dtype], shard_size)
            tensors = state.parameters_of(module)
        files = sorted(file.name for file in unfinished.glob(f"*{SUFFIX}"))
    is_factory = isinstance(model, ModuleRef) and rebuild is not None
    return ExportedWeights(
        step=manifest.step,
        folder=str(to),
        bytes=sum(tensor.nbytes for tensor in tensors.values()),
        tensors=len(tensors),
        dtypes=tuple(sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values()})),
        files=tuple(files),
        no_config=f"{model.name} is not a transformers model" if is_factory else "",
        adapter=rebuild is None,
        base=_base_sentence(adapter, merged=rebuild is not None),
    )


def _base_sentence(adapter: Adapter, *, merged: bool) -> str:
    """Sentence on the base of a run with quantised weights; empty for other runs."""
    if not adapter.quantised:
        return ""
    if merged:
        return "Merged into the NF4 weights of the run, dequantised: not into the pretrained ones"
    return "Trained on NF4 weights: load the base in NF4, or use --merge"


def parts_of(saved: Mapping[str, Tensor], dtype: DType | None) -> list[Part]:
    """The weights of a checkpoint as full parts, in the dtypes to be written."""
    parts = []
    for name, tensor in saved.items():
        if name.startswith(_PREFIX):
            written = (
                TORCH_NAMES[dtype] if dtype and tensor.dtype in _FLOAT_DTYPES else tensor.dtype
            )
            plain = name.removeprefix(_PREFIX)
            parts.append(Part(plain, written, (0,) * len(tensor.shape), tensor.shape))
    return parts


def shards_of(parts: Sequence[Part], most: int) -> dict[str, list[Part]]:
    """Tensors of each file, by file name, of at most `most` bytes.

    A larger tensor gets its own file.
    """
    shards: list[list[Part]] = [[]]
    size = 0
    for part in parts:
        if shards[-1] and size + part.length > most:
            shards.append([])
            size = 0
        shards[-1].append(part)
        size += part.length
    if len(shards) == 1:
        return {f"{_NAME}{SUFFIX}": shards[0]}
    return {
        f"{_NAME}-{number:05d}-of-{len(shards):05d}{SUFFIX}": shard
        for number, shard in enumerate(shards, 1)
    }


def _main_dtype(parts: Sequence[Part]) -> str:
    """The floating-point dtype with the most bytes; any dtype if no weight is floating-point."""
    counts: dict[str, int] = {}
    for part in parts:
        counts[part.dtype] = counts.get(part.dtype, 0) + part.length
    floats = {dtype: count for dtype, count in counts.items() if dtype in _FLOAT_DTYPES}
    return max(floats or counts, key=lambda dtype: counts[dtype])


def _index(shards: dict[str, list[Part]]) -> bytes:
    """The bytes of model.safetensors.index.json."""
    total = sum(part.length for shard in shards.values() for part in shard)
    places = {part.tensor: name for name, shard in shards.items() for part in shard}
    table = {"metadata": {"total_size": total}, "weight_map": places}
    return f"{json.dumps(table, indent=2)}\n".encode()


def _write_shard(path: Path, shard: list[Part], reader: TensorReader, progress: Progress) -> None:
    """Write one file of weights; `progress` gets the bytes written since its last call."""
    # Widest dtype first, so that every tensor is aligned to its element size.
    ordered = sorted(shard, key=lambda part: -DTYPES[part.dtype])
    with SyncedFile(path) as file:
        file.write(safetensors_header({part.tensor: part for part in ordered}, {}))
        for part in ordered:
            for data in _bytes_as_written(part, reader):
                file.write(data)
                progress(len(data))


def _bytes_as_written(part: Part, reader: TensorReader) -> Iterator[memoryview]:
    """Yield the bytes of a weight in the dtype to be written."""
    values = reader.read(f"{_PREFIX}{part.tensor}").reshape(-1)
    for begin in range(0, values.numel(), _CHUNK):
        yield bytes_of(_cast(part, values[begin : begin + _CHUNK]))


def _cast(part: Part, values: torch.Tensor) -> torch.Tensor:
    """A weight in the dtype of `part`; raise SpecError if a value overflows."""
    dtype = getattr(torch, part.dtype)
    if values.dtype == dtype:
        return values
    converted = values.to(dtype)
    if not torch.equal(converted.isfinite(), values.isfinite()):
        largest = values[values.isfinite()].abs().max().item()
        raise SpecError(
            f"--dtype: {part.tensor} contains {largest:.4g}, which overflows {part.dtype}; "
            "use bf16 or fp32"
        )
    return converted
