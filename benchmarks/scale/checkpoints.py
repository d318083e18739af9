"""Cost of the checkpoint index: for rank 0 in a save, for every rank in a load.

The shards of a 70B model with AdamW, split as fully_shard splits them, go through the same classes
as in a run. Tensors have no data and nothing is sent: only the work on the index is measured.
"""

from __future__ import annotations

import pickle
import time
import zlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from benchmarks.scale.cost import (
    Case,
    Measured,
    Part,
    exponent,
    in_subprocess,
    memory_mb,
    reset_peak,
    rows,
    seconds,
    size,
    timed,
)
from shardwise.checkpoint.format.checksum import BLOCK
from shardwise.checkpoint.format.pieces import Piece, Tensor
from shardwise.checkpoint.format.shard import Part as Cut
from shardwise.checkpoint.format.shard import file_of, header_of, placed

MODEL = "llama-3-70b"
STATES = ("exp_avg", "exp_avg_sq")
PROJECTED = (512, 4096, 16_384, 100_000)
RANDOM_BYTES = 5056


@lru_cache
def shapes() -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters of the model, under names as long as in a run."""
    from shardwise.spec.lookup import find_model
    from shardwise.spec.strategy import Strategy
    from shardwise.units.load import load_units

    units = load_units(find_model(MODEL), 4096, Strategy(kind="zero3"))
    found = {p.name: p.shape for p in units.root.parameters}
    for number, block in enumerate(units.blocks):
        found |= {f"model.layers.{number}.{p.name}": p.shape for p in block.parameters}
    return found


@lru_cache
def tensors(ranks: int) -> dict[str, Tensor]:
    """All saved tensors: parameters, two moments and a step count each, and per-rank state."""
    found: dict[str, Tensor] = {}
    for name, shape in shapes().items():
        for full in (f"model.{name}", *(f"optimizer.{name}.{state}" for state in STATES)):
            found[full] = Tensor(full, "float32", shape)
        full = f"optimizer.{name}.step"
        found[full] = Tensor(full, "float32", ())
    for rank in range(ranks):
        for full, dtype, shape in (
            (f"rank.{rank}.window", "float64", (5,)),
            (f"rank.{rank}.random.cpu", "uint8", (RANDOM_BYTES,)),
        ):
            found[full] = Tensor(full, dtype, shape)
    return found


def chunks(rows_: int, shard: int) -> int:
    """Number of shards along dimension 0; ranks without rows share one empty shard."""
    each = -(-rows_ // shard)
    filled = -(-rows_ // each)
    return filled + (filled < shard)


def piece_count(ranks: int, shard: int) -> int:
    """Number of entries of the index; replicas write once."""
    moments = 1 + len(STATES)
    cut = sum(moments * chunks(shape[0], shard) for shape in shapes().values())
    return cut + len(shapes()) + 2 * ranks


def cuts(rank: int, ranks: int, shard: int) -> Iterator[Cut]:
    """Shards that a rank writes. torch chooses among replicas; here they alternate."""
    place, replica = rank % shard, rank // shard
    replicas = ranks // shard
    for number, tensor in enumerate(tensors(0).values()):
        if not tensor.shape:
            if number % ranks == rank:
                yield Cut(tensor.name, tensor.dtype, (), ())
            continue
        if number % replicas != replica:
            continue
        first, *others = tensor.shape
        each = -(-first // shard)
        filled = -(-first // each)
        if place > filled:
            continue
        begin = min(place * each, first)
        offsets = (begin, *(0 for _ in others))
        yield Cut(tensor.name, tensor.dtype, offsets, (min(each, first - begin), *others))
    yield Cut(f"rank.{rank}.window", "float64", (0,), (5,))
    yield Cut(f"rank.{rank}.random.cpu", "uint8", (0,), (RANDOM_BYTES,))


def written(rank: int, ranks: int, shard: int, head: int) -> list[Piece]:
    """Index entries that a rank sends to rank 0, with placeholders as long as checksums."""
    found = []
    for piece in placed(list(cuts(rank, ranks, shard)), file_of(rank), head):
        seed = zlib.crc32(f"{piece.tensor}{piece.offsets}".encode())
        count = max(1, -(-piece.length // BLOCK))
        checks = tuple((seed * (n + 1)) % 2**32 for n in range(count))
        found.append(piece._replace(crc32=checks))
    return found


def messages(ranks: int, shard: int) -> list[bytes]:
    """Messages that all ranks send to rank 0 after writing."""
    from shardwise.checkpoint.format.manifest import FileRecord

    head = len(header_of(list(cuts(0, ranks, shard))))
    found = []
    for rank in range(ranks):
        pieces = written(rank, ranks, shard, head)
        size_ = head + sum(piece.length for piece in pieces)
        record = FileRecord(name=file_of(rank), bytes=size_, head=head, crc32=2**31)
        found.append(pickle.dumps((record, pieces)))
    return found


def index_of(ranks: int, shard: int) -> bytes:
    from shardwise.checkpoint.format.index import write_index

    pieces = (p for one in messages(ranks, shard) for p in pickle.loads(one)[1])
    return write_index(tensors(ranks).values(), pieces)


def measure(what: str, ranks: int, shard: int | None = None) -> dict[str, float]:
    shard = shard or ranks
    measures = {"save": _save, "load": _load, "plan": _plan}
    return measures[what](ranks, shard)


def _save(ranks: int, shard: int) -> dict[str, float]:
    """Work of rank 0 after all ranks have written: their messages, the index, the manifest."""
    from shardwise.checkpoint.format.index import write_index
    from shardwise.checkpoint.format.manifest import Manifest, write_manifest

    sent = in_subprocess(messages, ranks, shard)
    known = tensors(ranks).values()
    before = reset_peak()
    start = time.process_time()
    results = [pickle.loads(one) for one in sent]
    gathered = time.process_time()
    data = write_index(known, (piece for _, pieces in results for piece in pieces))
    indexed = time.process_time()
    files = tuple(record for record, _ in results)
    about = Manifest(step=1, world=ranks, sequences=0, run={}, versions={}, files=files)
    manifest = write_manifest(about)
    return {
        "unpickle_s": gathered - start,
        "index_s": indexed - gathered,
        "manifest_s": time.process_time() - indexed,
        "save_s": time.process_time() - start,
        "pieces": sum(len(pieces) for _, pieces in results),
        "sent_bytes": sum(map(len, sent)),
        "index_bytes": len(data),
        "manifest_bytes": len(manifest),
        "grown_mb": memory_mb("VmHWM") - before,
    }


def _load(ranks: int, shard: int) -> dict[str, float]:
    """Work of every rank before it reads a tensor: index, coverage check, metadata for torch."""
    from shardwise.checkpoint.dcp.load import no_garbage_collection
    from shardwise.checkpoint.dcp.reader import CheckpointReader
    from shardwise.checkpoint.format.folder import LocalFolder
    from shardwise.checkpoint.format.index import read_index
    from shardwise.checkpoint.verify.coverage import problems_of

    data = in_subprocess(index_of, ranks, shard)
    before = reset_peak()
    with no_garbage_collection():
        start = time.process_time()
        saved = read_index(data)
        read = time.process_time()
        assert not list(problems_of(saved))
        covered = time.process_time()
        reader = CheckpointReader(LocalFolder(_unused_folder()), saved)
        metadata = reader.read_metadata()
        done = time.process_time()
    assert len(metadata.state_dict_metadata) == len(saved.tensors)
    return {
        "read_s": read - start,
        "cover_s": covered - read,
        "reader_s": done - covered,
        "load_s": done - start,
        "pieces": len(saved.pieces),
        "grown_mb": memory_mb("VmHWM") - before,
    }


def _unused_folder() -> Any:
    from pathlib import Path

    return Path("never-opened")


def _plan(ranks: int, shard: int) -> dict[str, float]:
    """Work of rank 0 in the first save: torch's plan of who writes what, checked in one pass."""
    from torch.distributed.checkpoint.planner import SavePlan

    from shardwise.checkpoint.dcp.save import check_pieces
    from shardwise.engine.torch_private import save_planner

    plans = [SavePlan(_items(rank, ranks, shard)) for rank in range(ranks)]
    sent = len(pickle.dumps(plans[0])) * ranks
    planner = save_planner("scale", check_pieces)
    before = reset_peak()
    start = time.process_time()
    planner.create_global_plan(plans)
    return {
        "plan_s": time.process_time() - start,
        "sent_bytes": sent,
        "grown_mb": memory_mb("VmHWM") - before,
    }


def _items(rank: int, ranks: int, shard: int) -> list[Any]:
    import torch
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    known = tensors(ranks)
    return [
        WriteItem(
            index=MetadataIndex(cut.tensor, torch.Size(cut.offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(torch.Size(cut.offsets), torch.Size(cut.sizes)),
                properties=TensorProperties(dtype=getattr(torch, cut.dtype)),
                size=torch.Size(known[cut.tensor].shape),
            ),
        )
        for cut in cuts(rank, ranks, shard)
    ]


# ---- text ---------------------------------------------------------------------------------------


def _of(found: list[Measured], what: str) -> list[Measured]:
    return [one for one in found if one.case["what"] == what]


def table(found: list[Measured]) -> str:
    loads = {_layout(one.case): one for one in _of(found, "load")}
    plans = {_layout(one.case): one for one in _of(found, "plan")}
    saves = _of(found, "save")
    body = []
    for one in saves:
        load, plan = loads[_layout(one.case)], plans.get(_layout(one.case))
        body.append([
            *(_layout(one.case), f"{one['pieces']:,.0f}", size(one["index_bytes"])),
            f"{timed(one, 'save_s')}, {size(one['grown_mb'] * 2**20)}",
            f"{timed(load, 'load_s')}, {size(load['grown_mb'] * 2**20)}",
            timed(plan, "plan_s") if plan else "",
        ])  # fmt: skip
    full = [one for one in saves if not one.case.get("shard")]
    body += _projected(full[-1], loads[_layout(full[-1].case)], _of(found, "plan")[-1])
    text = rows(
        [
            *("ranks", "index entries", "size of tensors.json", "rank 0, after a save"),
            *("every rank, before a load", "rank 0, plan of the first save"),
        ],
        body,
    )
    p = exponent([one["pieces"] for one in full], [one["save_s"] for one in full])
    return text + (
        f"\nSave time grows as index entries to the power {p:.2f}. After a save on"
        f" {full[-1].case['ranks']} ranks, rank 0 receives {size(full[-1]['sent_bytes'])} in total;"
        f" the manifest is {size(full[-1]['manifest_bytes'])}.\n"
    )


def _layout(case: Case) -> str:
    shard = case.get("shard")
    return f"{case['ranks']:,}" + (f", hybrid {shard:,}" if shard else "")


def _projected(save: Measured, load: Measured, plan: Measured) -> list[list[str]]:
    """Rows projected linearly in the number of index entries."""
    found = []
    known = plan.case["ranks"]
    for ranks in PROJECTED:
        if ranks <= save.case["ranks"]:
            continue
        pieces = piece_count(ranks, ranks)
        more = pieces / save["pieces"]
        planned = plan["plan_s"] * pieces / piece_count(known, known)
        found.append([
            *(f"*{ranks:,}*", f"{pieces:,}", f"*{size(save['index_bytes'] * more)}*"),
            f"*{seconds(save['save_s'] * more)}, {size(save['grown_mb'] * more * 2**20)}*",
            f"*{seconds(load['load_s'] * more)}, {size(load['grown_mb'] * more * 2**20)}*",
            f"*{seconds(planned)}*",
        ])  # fmt: skip
    return found


def _cases(ranks: tuple[int, ...], planned: tuple[int, ...]) -> list[Case]:
    found: list[Case] = [{"what": what, "ranks": n} for n in ranks for what in ("save", "load")]
    return found + [{"what": "plan", "ranks": n} for n in planned]


PART = Part(
    "Checkpoints",
    [
        *_cases((2, 8, 64, 512), (2, 8, 64, 256)),
        {"what": "save", "ranks": 512, "shard": 8},
        {"what": "load", "ranks": 512, "shard": 8},
    ],
    _cases((2, 16), (2,)),
    measure,
    table,
)
