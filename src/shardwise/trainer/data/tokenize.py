"""Tokenize text files once; the result is cached under a hash of everything that affects it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shardwise.spec.chat import read_json
from shardwise.spec.record import SpecError
from shardwise.spec.train import DataSettings
from shardwise.trainer.data.documents import read_lines, read_records, require_text
from shardwise.trainer.data.shards import INDEX, Tokens, TokenShards, write_shards

SUFFIXES = (".txt", ".jsonl", ".parquet")
_PIECE_BYTES = 2**22
_BATCH_DOCUMENTS = 512
_ADVICE = "correct or remove this record, or name another field in data.text_key"


class Tokenizer(Protocol):
    """Converts documents to token ids; `end` is the token after a document, None without one."""

    vocab: int
    end: int | None

    def encode(self, texts: list[str]) -> list[Tokens]: ...


class ByteTokenizer:
    """One token per byte of UTF-8. Documents end with 0xFF, which UTF-8 never uses."""

    vocab: int = 256
    end: int | None = 255

    def encode(self, texts: list[str]) -> list[Tokens]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


class FileTokenizer:
    """A tokenizer.json, read with the tokenizers library."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as Library
        except ModuleNotFoundError:
            raise SpecError(
                "data.tokenizer: needs the tokenizers library; install it with "
                "'pip install shardwise[hf]'"
            ) from None
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.exists():
            raise SpecError(
                f"data.tokenizer: {file} does not exist; use a tokenizer.json or 'bytes'"
            )
        try:
            self._library: Any = Library.from_file(str(file))
        except Exception as error:
            raise SpecError(f"data.tokenizer: cannot read {file}: {error}") from None
        self.vocab: int = self._library.get_vocab_size(with_added_tokens=True)
        names = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")
        ids = [self._library.token_to_id(name) for name in names]
        self.end: int | None = next((token for token in ids if token is not None), None)

    def encode(self, texts: list[str]) -> list[Tokens]:
        dtype = np.uint16 if self.vocab <= 2**16 else np.uint32
        encoded = self._library.encode_batch(texts, add_special_tokens=False)
        return [np.asarray(one.ids, dtype=dtype) for one in encoded]


def load_tokenizer(data: DataSettings) -> Tokenizer:
    return ByteTokenizer() if data.tokenizer == "bytes" else FileTokenizer(Path(data.tokenizer))


def tokenized(data: DataSettings) -> TokenShards:
    """The tokens of `data.path`: from the cache, or tokenized now."""
    files = find_files(data.path)
    folder = Path(data.cache) / _cache_name(data, files)
    if not (folder / INDEX).exists():
        tokenizer = load_tokenizer(data)
        about = {"files": [file.name for file in files], "vocab": tokenizer.vocab}
        write_shards(folder, _tokens(files, data.text_key, tokenizer), about)
    return TokenShards(folder)


def find_files(paths: tuple[str, ...]) -> list[Path]:
    """All data files in `paths`, in a fixed order; folders are searched recursively.

    Raises SpecError for paths that are missing, have another suffix or are no regular files.
    """
    problems, files = [], []
    for path in map(Path, paths):
        inside = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES) if path.is_dir() else []
        if path.is_dir() and not inside:
            problems.append(f"data.path: no {', '.join(SUFFIXES)} files in {path}")
        elif not path.exists():
            problems.append(f"data.path: {path} does not exist")
        elif not path.is_dir() and path.suffix not in SUFFIXES:
            problems.append(f"data.path: {path} is not one of {', '.join(SUFFIXES)}")
        # A pipe or a device may never end.
        special = [p for p in inside or [path] if p.exists() and not (p.is_file() or p.is_dir())]
        problems += [f"data.path: {p} is not a regular file; leave it out" for p in special]
        files += inside or [path]
    if problems:
        raise SpecError(problems)
    return files


def _cache_name(data: DataSettings, files: list[Path]) -> str:
    """The name of the cache folder for the files as text."""
    return cache_name(data, files, f"2/{data.tokenizer}/{data.text_key}")


def cache_name(data: DataSettings, files: list[Path], settings: str) -> str:
    """A folder name that changes when a file, the tokenizer or `settings` changes."""
    digest = hashlib.sha256(settings.encode())
    tokenizer = Path(data.tokenizer)
    if data.tokenizer != "bytes":
        files = [*files, tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer]
    for file in files:
        status = file.stat() if file.exists() else None
        changed = (status.st_size, status.st_mtime_ns) if status else ()
        digest.update(f"{file.resolve()}/{changed}".encode())
    return f"{Path(data.path[0]).stem[:40]}-{digest.hexdigest()[:16]}"


def _tokens(files: list[Path], text_key: str, tokenizer: Tokenizer) -> Iterator[Tokens]:
    """Yield the tokens of all files in order.

    The end token follows each document; of text files, each file if there are several.
    """
    several = len(files) > 1
    for file in files:
        pieces = file.suffix == ".txt"
        batch: list[str] = []
        for text in read_texts(file, text_key):
            batch.append(text)
            if len(batch) == (1 if pieces else _BATCH_DOCUMENTS):
                yield from _encode_texts(batch, tokenizer, closes=not pieces)
                batch = []
        yield from _encode_texts(batch, tokenizer, closes=not pieces)
        if pieces and several:
            yield from _encode_texts([""], tokenizer, closes=True)


def _encode_texts(texts: list[str], tokenizer: Tokenizer, closes: bool) -> Iterator[Tokens]:
    """Yield the tokens of each text and, with `closes`, the end token after each."""
    for tokens in tokenizer.encode(texts) if texts else []:
        yield tokens
        if closes and tokenizer.end is not None:
            yield np.asarray([tokenizer.end], dtype=tokens.dtype)


def read_texts(file: Path, text_key: str) -> Iterator[str]:
    """Yield the documents of a jsonl or parquet file, or chunks of lines of a text file."""
    readers = {".txt": _text_pieces, ".jsonl": _jsonl, ".parquet": _parquet}
    try:
        yield from readers[file.suffix](file, text_key)
    except (UnicodeDecodeError, OSError) as error:
        raise SpecError(f"data.path: cannot read {file}: {error}") from None


def _text_pieces(file: Path, _: str) -> Iterator[str]:
    """Yield chunks of lines with a little more than _PIECE_BYTES characters."""
    piece: list[str] = []
    size = 0
    for line in read_lines(file):
        piece.append(line)
        size += len(line)
        if size > _PIECE_BYTES:
            yield "".join(piece)
            piece, size = [], 0
    if piece:
        yield "".join(piece)


def _jsonl(file: Path, text_key: str) -> Iterator[str]:
    """Yield the text under `text_key` of each record."""
    for line, where in read_records(file):
        record = read_json(line)
        if not isinstance(record, dict) or text_key not in record:
            raise SpecError(
                f"data.path: {where} is not a JSON object with the key {text_key!r}; set "
                "data.text_key"
            )
        yield require_text(record[text_key], text_key, where, _ADVICE)


def _parquet(file: Path, text_key: str) -> Iterator[str]:
    """Yield the text in the column `text_key` of each row."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise SpecError(
            "data.path: parquet needs pyarrow; install it with 'pip install shardwise[data]'"
        ) from None
    try:
        table = parquet.ParquetFile(file)
        if text_key not in table.schema_arrow.names:
            raise SpecError(
                f"data.path: {file} has no column {text_key!r}; set data.text_key to one of "
                f"{', '.join(table.schema_arrow.names)}"
            )
        number = 0
        for batch in table.iter_batches(batch_size=_BATCH_DOCUMENTS, columns=[text_key]):
            for value in batch.column(0).to_pylist():
                number += 1
                yield require_text(value, text_key, f"row {number} of {file}", _ADVICE)
    except pyarrow.ArrowException as error:
        raise SpecError(f"data.path: cannot read {file}: {error}") from None
