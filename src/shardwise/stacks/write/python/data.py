"""The data of a script: synthetic, from token files, or from the user's iterable."""

from __future__ import annotations

from pathlib import Path

from shardwise.spec.chat import holds_chat
from shardwise.spec.model import ModelSpec
from shardwise.spec.run import RunSpec
from shardwise.spec.train import DataSettings
from shardwise.stacks.write.python.piece import Piece
from shardwise.stacks.write.python.settings import Code, data_of, quoted


def data_settings(run: RunSpec) -> dict[str, object]:
    data = data_of(run)
    if not data.path:
        return {}
    found = token_folders(data)
    folder = found[-1].as_posix() if found else f"{Path(data.cache).as_posix()}/NAME"
    return {"TOKENS": Code(f"Path({quoted(folder)})")}


def token_folders(data: DataSettings) -> list[Path]:
    """Cached token folders of a text file with this name, the newest last.

    None of chat examples: their tokens are flagged, and no script reads them.
    """
    if holds_chat(data):
        return []
    stem = Path(data.path[0]).stem[:40]
    indexes = [
        index
        for index in Path(data.cache).glob("*/index.json")
        if index.parent.name.rpartition("-")[0] == stem
    ]
    return [index.parent for index in sorted(indexes, key=lambda file: file.stat().st_mtime_ns)]


def knows_vocabulary(run: RunSpec) -> bool:
    """Whether the script needs no function for the vocabulary size."""
    return isinstance(run.model, ModelSpec) or not data_of(run).synthetic


def data_pieces(run: RunSpec) -> list[Piece]:
    """Code that defines `micro_batches`; it takes a `vocab` where that is not a constant."""
    data = data_of(run)
    if data.source is not None:
        module, _, function = data.source.partition(":")
        code = _GIVEN.replace("SOURCE", f"own_data.{function}")
        return [Piece(code, ("collections.abc:Iterator", "torch", f"{module} as own_data"))]
    if data.synthetic:
        made_up, batches = _MADE_UP, _MICRO_BATCHES
        if not knows_vocabulary(run):
            made_up = made_up.replace("position: int", "position: int, vocab: int")
            made_up = made_up.replace("VOCAB", "vocab")
            batches = batches.replace("world: int", "world: int, vocab: int")
            batches = batches.replace("sequence(position)", "sequence(position, vocab)")
        return [
            Piece(made_up, ("hashlib:sha256", "torch")),
            Piece(batches, ("collections.abc:Iterator", "itertools:count", "torch")),
        ]
    pieces = [Piece(_TOKENS, ("json", "torch"))]
    if data.shuffle:
        pieces.append(Piece(_SHUFFLE, ("hashlib:sha256", "struct")))
    read = _FROM_TOKENS if data.shuffle else _FROM_TOKENS_IN_ORDER
    return [*pieces, Piece(read, ("collections.abc:Iterator", "itertools:count", "torch"))]


_MICRO_BATCHES = '''
def micro_batches(rank: int, world: int) -> Iterator[torch.Tensor]:
    """The micro-batches of one rank, without end: rows of SEQ_LEN + 1 token ids."""
    for number in count():
        first = (number * world + rank) * MICRO_BATCH
        rows = [sequence(position) for position in range(first, first + MICRO_BATCH)]
        yield torch.stack(rows)
'''

_MADE_UP = '''
def sequence(position: int) -> torch.Tensor:
    """Synthetic tokens: count up by a fixed increment, with a random jump one time in ten."""
    seed = sha256(f"{SEED}/data/{position}".encode()).digest()
    random = torch.Generator().manual_seed(int.from_bytes(seed[:8], "little") >> 1)
    increment = torch.randint(1, 9, (1,), generator=random)
    jumps = torch.rand(SEQ_LEN + 1, generator=random) < 0.1
    jumps[0] = True
    tokens = torch.randint(VOCAB, (SEQ_LEN + 1,), generator=random)
    return torch.where(jumps, tokens, increment).cumsum(0) % VOCAB
'''

_TOKENS = '''
class Tokens:
    """Flat files of token ids, mapped and read as if they were one long tensor."""

    def __init__(self) -> None:
        index = json.loads((TOKENS / "index.json").read_text())
        dtype = getattr(torch, index["dtype"])
        self.count = sum(index["tokens"])
        self.shards = [
            torch.from_file(str(TOKENS / f"{number:05}.bin"), size=size, dtype=dtype)
            for number, size in enumerate(index["tokens"])
        ]

    def read(self, start: int, length: int) -> torch.Tensor:
        parts = []
        for tokens in self.shards:
            parts.append(tokens[max(start, 0) : max(start + length, 0)].long())
            start -= len(tokens)
        return torch.cat(parts)
'''

_SHUFFLE = '''
def shuffled(index: int, size: int, key: str) -> int:
    """Apply a permutation of 0..size-1, selected by `key`, to an index.

    A Feistel network permutes numbers below a power of four; an index outside the range is
    permuted again until it is inside (cycle walking).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    digest = sha256(key.encode()).digest() + sha256(f"+{key}".encode()).digest()
    while True:
        left, right = index >> half, index & mask
        for word in struct.unpack("<6Q", digest[:48]):
            value = right ^ word
            value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
            value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
            left, right = right, left ^ ((value ^ (value >> 31)) & mask)
        index = (left << half) | right
        if index < size:
            return index
'''

_FROM_TOKENS = '''
def micro_batches(rank: int, world: int) -> Iterator[torch.Tensor]:
    """The micro-batches of one rank, without end: rows of SEQ_LEN + 1 token ids.

    Neighbours share a token: the last target of one is the first input of the next.
    """
    tokens = Tokens()
    size = (tokens.count - 1) // SEQ_LEN
    for number in count():
        first = (number * world + rank) * MICRO_BATCH
        rows = []
        for position in range(first, first + MICRO_BATCH):
            epoch, index = divmod(position, size)
            index = shuffled(index, size, f"{SEED}/{epoch}")
            rows.append(tokens.read(index * SEQ_LEN, SEQ_LEN + 1))
        yield torch.stack(rows)
'''
_FROM_TOKENS_IN_ORDER = '''
def micro_batches(rank: int, world: int) -> Iterator[torch.Tensor]:
    """The micro-batches of one rank, without end: rows of SEQ_LEN + 1 token ids.

    Neighbours share a token: the last target of one is the first input of the next.
    """
    tokens = Tokens()
    size = (tokens.count - 1) // SEQ_LEN
    for number in count():
        first = (number * world + rank) * MICRO_BATCH
        positions = range(first, first + MICRO_BATCH)
        yield torch.stack([tokens.read(p % size * SEQ_LEN, SEQ_LEN + 1) for p in positions])
'''

_GIVEN = '''
def micro_batches(rank: int, world: int) -> Iterator[torch.Tensor]:
    """The micro-batches of one rank: rows of SEQ_LEN + 1 token ids."""
    for batch in SOURCE(rank, world):
        yield torch.as_tensor(batch).long()
'''
