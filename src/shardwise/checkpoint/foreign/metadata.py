"""Read the `.metadata` of torch's distributed checkpoints without unpickling it.

Torch unpickles it, which imports and calls whatever the file names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.checkpoint.format.paths import UntrustedError
from shardwise.checkpoint.format.pieces import DTYPES, CheckpointContent, Piece, Tensor
from shardwise.observe.safe_pickle import Record, UnsafePickleError, load_pickle

NAME = ".metadata"
_TORCH_MODULE = "torch.distributed.checkpoint"
# All names in genuine metadata, besides dtypes.
_KNOWN_CLASSES = {
    *((f"{_TORCH_MODULE}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    (f"{_TORCH_MODULE}.metadata", "TensorProperties"),
    (f"{_TORCH_MODULE}.metadata", "TensorStorageMetadata"),
    (f"{_TORCH_MODULE}.metadata", "ChunkStorageMetadata"),
    (f"{_TORCH_MODULE}.metadata", "BytesStorageMetadata"),
    (f"{_TORCH_MODULE}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_TORCH_MODULE}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
    ("collections", "OrderedDict"),
}
# Enumerations in genuine metadata, and their members.
_MEMBERS = {
    (f"{_TORCH_MODULE}.metadata", "_MEM_FORMAT_ENCODING"): {
        "TORCH_CONTIGUOUS_FORMAT",
        "TORCH_CHANNELS_LAST",
        "TORCH_PRESERVE_FORMAT",
    }
}
_PieceKey = tuple[str, tuple[int, ...] | None]
_Chunks = dict[_PieceKey, tuple[int, ...]]


def read_metadata(data: bytes) -> CheckpointContent:
    """Parse the metadata of a checkpoint: its tensors, and the pieces that are in a file.

    A chunk that is in no file is missing from `pieces`, so that they do not cover the tensor.
    Raises UntrustedError if the metadata is invalid.
    """
    try:
        found = load_pickle(data, _is_known, _MEMBERS)
    except UnsafePickleError as error:
        raise UntrustedError(str(error)) from None
    if not _is_record_of(found, "Metadata"):
        raise UntrustedError("is not the metadata of a checkpoint")
    entries, storage = found.field("state_dict_metadata"), found.field("storage_data")
    if type(entries) is not dict or type(storage) is not dict:
        raise UntrustedError("lacks the list of tensors or files")
    tensors: dict[str, Tensor] = {}
    chunks: _Chunks = {}
    objects: set[str] = set()
    # A list shared by many tensors takes no bytes in the file; genuine metadata has none.
    left = len(data)
    for name, entry in entries.items():
        if type(name) is not str:
            raise UntrustedError("has an entry without a name")
        if _is_record_of(entry, "BytesStorageMetadata"):
            objects.add(name)
            continue
        tensors[name] = _tensor(name, entry)
        listed = entry.field("chunks")
        if type(listed) is not list or len(listed) > left:
            raise UntrustedError(f"has no valid chunks for {name[:100]!r}")
        left -= len(listed)
        for offsets, sizes in _boxes(name, listed):
            # Ranks without a part of a tensor all write an empty chunk at the same offset.
            if chunks.get((name, offsets)) and 0 not in sizes + chunks[name, offsets]:
                raise UntrustedError(f"has two chunks of {name[:100]!r} at {list(offsets)}")
            if (name, offsets) not in chunks or 0 not in sizes:
                chunks[name, offsets] = sizes
    pieces = _pieces(storage, tensors, chunks, objects)
    return CheckpointContent(
        tensors,
        [piece for piece in pieces if piece.tensor in tensors],
        [piece for piece in pieces if piece.tensor in objects],
    )


def _is_known(module: str, name: str) -> bool:
    """Whether a name occurs in genuine metadata."""
    return (module, name) in _KNOWN_CLASSES or (module == "torch" and name in DTYPES)


def _is_record_of(found: Any, name: str) -> bool:
    """Whether an unpickled value is a record of the class with this name."""
    return isinstance(found, Record) and found.kind.name == name


def _tensor(name: str, entry: Any) -> Tensor:
    """The tensor of an entry; raises UntrustedError if the entry is invalid."""
    if not _is_record_of(entry, "TensorStorageMetadata"):
        raise UntrustedError(f"has an invalid entry for {name[:100]!r}")
    properties = entry.field("properties")
    value = None
    if _is_record_of(properties, "TensorProperties"):
        state = properties.state
        value = state[0] if type(state) is tuple and state else properties.field("dtype")
    dtype = value.kind if isinstance(value, type) and issubclass(value, Record) else None
    if dtype is None or dtype.module != "torch" or dtype.name not in DTYPES:
        raise UntrustedError(f"has {name[:100]!r} with an unknown dtype")
    return Tensor(name, dtype.name, _size(entry.field("size"), name))


def _boxes(name: str, listed: list[Any]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offsets and sizes of each chunk of a tensor; raises UntrustedError."""
    for chunk in listed:
        if not _is_record_of(chunk, "ChunkStorageMetadata"):
            raise UntrustedError(f"has no valid chunks for {name[:100]!r}")
        yield _size(chunk.field("offsets"), name), _size(chunk.field("sizes"), name)


def _pieces(
    storage: dict[Any, Any], tensors: dict[str, Tensor], chunks: _Chunks, objects: set[str]
) -> list[Piece]:
    """The pieces of all tensors and objects that are in a file; raises UntrustedError."""
    seen: set[_PieceKey] = set()
    pieces = []
    for index, info in storage.items():
        piece, place = _piece(index, info)
        name, offsets = place
        if place in seen:
            raise UntrustedError(f"lists {str(piece)[:100]!r} twice")
        seen.add(place)
        if name in tensors:
            if offsets is None or (sizes := chunks.get((name, offsets))) is None:
                where = f"{name} at {list(offsets or ())}"[:150]
                raise UntrustedError(f"has no size for {where!r}")
            piece = piece._replace(sizes=sizes)
        elif name not in objects or offsets is not None:
            raise UntrustedError(
                f"has a location for {name[:100]!r}, which is not in the list of tensors"
            )
        pieces.append(piece)
    for name in objects:
        if (name, None) not in seen:
            raise UntrustedError(f"has no valid location for {name[:100]!r}")
    return pieces


def _piece(index: Any, info: Any) -> tuple[Piece, _PieceKey]:
    """A piece without its sizes, and its name and offsets; raises UntrustedError.

    The offsets are None for an object that is not a tensor.
    """
    if not _is_record_of(index, "MetadataIndex") or not _is_record_of(info, "_StorageInfo"):
        raise UntrustedError("has an invalid location entry")
    name, offset = index.field("fqn"), index.field("offset")
    file, start, length = (info.field(key) for key in ("relative_path", "offset", "length"))
    if type(name) is not str or type(file) is not str:
        raise UntrustedError("has a location without a name or file")
    if not all(type(n) is int and 0 <= n < 2**61 - 1 for n in (start, length)):
        raise UntrustedError(f"has no valid location for {name[:100]!r}")
    if info.field("transform_descriptors"):
        raise UntrustedError(f"has {name[:100]!r} compressed or encrypted, which is not supported")
    offsets = None if offset is None else _size(offset, name)
    return Piece(name, offsets or (), (), file, start, length), (name, offsets)


def _size(value: Any, name: str) -> tuple[int, ...]:
    """A shape or offsets as a tuple of integers; raises UntrustedError if invalid."""
    if _is_record_of(value, "Size") and len(value.arguments) == 1:
        value = value.arguments[0]
    if type(value) is not tuple or len(value) > 64:
        raise UntrustedError(f"has {name[:100]!r} without a shape")
    if not all(type(n) is int and 0 <= n < 2**61 - 1 for n in value):
        raise UntrustedError(f"has {name[:100]!r} with an invalid shape")
    return value
