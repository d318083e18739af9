"""Cost of the checkpoint index for one rank: plan of a save, files written, files read in a load.

The state of a model with AdamW is divided as fully_shard divides it, among as many ranks as asked
for: DTensors without data, in torch's "fake" process group, which sends nothing. The code that
plans, writes and reads is that of a run. Only one rank runs; its files and those of rank 0 are on
disk.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.scale.cost import (
    Measured,
    Part,
    memory_mb,
    reset_peak,
    rows,
    size,
    timed,
)

SHORT = {"llama-3-70b": "70B", "llama-3.1-405b": "405B"}
STATES = ("exp_avg", "exp_avg_sq")
RANDOM_BYTES = 5056


def shapes(model: str) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters of a model, under names as long as in a run."""
    from shardwise.spec.lookup import find_model
    from shardwise.spec.strategy import Strategy
    from shardwise.units.load import load_units

    units = load_units(find_model(model), 4096, Strategy(kind="zero3"))
    found = {p.name: p.shape for p in units.root.parameters}
    for number, block in enumerate(units.blocks):
        found |= {f"model.layers.{number}.{p.name}": p.shape for p in block.parameters}
    return found


def join(rank: int, ranks: int) -> None:
    """Be one of many ranks that exist nowhere."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)


def state_of(model: str, ranks: int) -> dict[str, Any]:
    """Parameters, two moments and a step count of each: DTensors without data."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh("cpu", torch.arange(ranks))
    place = mesh.get_coordinate()
    assert place is not None

    def sharded(shape: tuple[int, ...]) -> Any:
        each = -(-shape[0] // ranks)
        own = max(0, min(each, shape[0] - place[0] * each))
        local = torch.empty((own, *shape[1:]), device="meta")
        full = torch.empty(shape, device="meta")
        return DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride()
        )

    found: dict[str, Any] = {}
    for name, shape in shapes(model).items():
        found[f"model.{name}"] = sharded(shape)
        for key in STATES:
            found[f"optimizer.{name}.{key}"] = sharded(shape)
        found[f"optimizer.{name}.step"] = torch.zeros(())
    return found


def own_of(rank: int) -> dict[str, Any]:
    """What each rank saves for itself."""
    import torch

    random = torch.zeros(RANDOM_BYTES, dtype=torch.uint8)
    window = torch.zeros(5, dtype=torch.float64)
    return {f"rank.{rank}.random.cpu": random, f"rank.{rank}.window": window}


def measure(model: str, ranks: int) -> dict[str, float]:
    """Cost for rank 1, which has shards of all tensors."""
    from shardwise.checkpoint.dcp.plan import local_shards, make_plan
    from shardwise.engine.rank_tree import RankTree

    found: dict[str, float] = {}
    rank, own = 1, own_of(1)
    with tempfile.TemporaryDirectory() as name:
        join(0, ranks)
        # The fake group knows no others.
        tree = RankTree(separate=False, one_group=ranks)
        state = state_of(model, ranks)
        # The first plan of a process, and the larger one: rank 0 has the counts of steps.
        with _counted(found, "plan"):
            plan = make_plan(local_shards(state, 0, ranks), own_of(0), tree)
        first_record, _ = write_rank(Path(name), plan, 0)
        join(rank, ranks)
        tree = RankTree(separate=False, one_group=ranks)
        state = state_of(model, ranks)
        plan = make_plan(local_shards(state, rank, ranks), own, tree)
        record, found["index_s"] = write_rank(Path(name), plan, rank)
        found["index_bytes"] = record.index_bytes
        found["pieces"] = len(plan.items)
        with _counted(found, "commit"):
            found |= commit(Path(name), plan, {0: first_record, rank: record}, ranks)
        with _counted(found, "load"):
            found["pieces_read"] = read(Path(name), state, own, rank, ranks)
        # The header of its own file, and the files of the index.
        found["read_bytes"] = record.head + sum(
            Path(name, file).stat().st_size
            for file in os.listdir(name)
            if not file.endswith(".safetensors")
        )
    return found


class _counted:  # noqa: N801
    """CPU time and added memory of a block, as `{what}_s` and `{what}_mb`."""

    def __init__(self, found: dict[str, float], what: str) -> None:
        self._found, self._what = found, what

    def __enter__(self) -> None:
        self._before, self._start = reset_peak(), time.process_time()

    def __exit__(self, *_: object) -> None:
        self._found[f"{self._what}_s"] = time.process_time() - self._start
        self._found[f"{self._what}_mb"] = memory_mb("VmHWM") - self._before


def write_rank(folder: Path, plan: Any, rank: int) -> tuple[Any, float]:
    """Write a rank's files, of which the tensors take no room; return CPU time of the index."""
    from shardwise.checkpoint.format.checksum import BLOCK, crc32
    from shardwise.checkpoint.format.rank_index import index_of, write_rank_index
    from shardwise.checkpoint.format.rank_table import RankRecord
    from shardwise.checkpoint.format.shard import file_of, header_of

    parts = plan.layout.parts_of(rank, plan.own)
    head = header_of(parts)
    total = len(head) + sum(part.length for part in parts)
    with (folder / file_of(rank)).open("wb") as file:
        file.write(head)
        file.truncate(total)
    # As many as there are blocks; their values do not matter here.
    checksums = [2**31 + n for part in parts for n in range(-(-part.length // BLOCK))]
    start = time.process_time()
    index = write_rank_index(plan.own, checksums)
    (folder / index_of(rank)).write_bytes(index)
    took = time.process_time() - start
    return RankRecord(total, len(head), crc32(head), len(index), crc32(index)), took


def commit(folder: Path, plan: Any, records: dict[int, Any], ranks: int) -> dict[str, float]:
    """What rank 0 writes for all; other ranks have records with the same sizes."""
    from shardwise.checkpoint.format import layout, manifest, rank_table
    from shardwise.checkpoint.format.checksum import crc32
    from shardwise.checkpoint.format.manifest import FileRecord, Manifest

    table = b"".join(rank_table.pack_record(records.get(rank, records[1])) for rank in range(ranks))
    files = {layout.NAME: layout.write_layout(plan.layout), rank_table.NAME: table}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    listed = tuple(
        FileRecord(name=name, bytes=len(data), head=len(data), crc32=crc32(data))
        for name, data in files.items()
    )
    about = Manifest(step=1, world=ranks, sequences=0, run={}, versions={}, files=listed)
    (folder / manifest.NAME).write_bytes(manifest.write_manifest(about))
    return {"layout_bytes": len(files[layout.NAME]), "table_bytes": len(table)}


def read(folder: Path, state: Any, own: Any, rank: int, ranks: int) -> int:
    """All that a rank does before it reads a tensor; the number of pieces it would read."""
    from shardwise.checkpoint.dcp.load import no_garbage_collection
    from shardwise.checkpoint.dcp.reader import CheckpointReader
    from shardwise.checkpoint.format.folder import LocalFolder
    from shardwise.checkpoint.verify.opened import open_checkpoint

    with no_garbage_collection():
        checkpoint = open_checkpoint(LocalFolder(folder), rank, ranks)
        metadata = CheckpointReader(checkpoint, {**state, **own}).read_metadata()
    entries: list[Any] = list(metadata.state_dict_metadata.values())
    return sum(len(entry.chunks) for entry in entries)


# ---- text ---------------------------------------------------------------------------------------


def table(found: list[Measured]) -> str:
    body = [
        [
            *(SHORT[one.case["model"]], f"{one.case['ranks']:,}"),
            *(size(one[key]) for key in ("layout_bytes", "table_bytes", "index_bytes")),
            *(size(one["read_bytes"]), _cost(one, "load"), _cost(one, "plan")),
            *(timed(one, "index_s"), _cost(one, "commit")),
        ]
        for one in found
    ]
    return rows(
        [
            *("model", "ranks", "`layout.json`", "`ranks.bin`", "index of a rank", "a rank reads"),
            *("before a load", "plan of a save", "writing its index", "rank 0: layout and table"),
        ],
        body,
    )


def _cost(one: Measured, what: str) -> str:
    return f"{timed(one, f'{what}_s')}, {size(max(0.0, one[f'{what}_mb']) * 2**20)}"


RANKS = (8, 512, 4096, 16_384, 100_000)
PART = Part(
    "Checkpoints",
    [{"model": model, "ranks": n} for model in SHORT for n in RANKS],
    [{"model": "llama-3-70b", "ranks": n} for n in (16, 100_000)],
    measure,
    table,
    rounds=1,
)
