"""Cost of the checkpoint index for one rank: plan of a save, files written, files read in a load.

The state of a model with AdamW is divided as fully_shard divides it, among as many ranks as asked
for: DTensors without data, in torch's "fake" process group, which sends nothing. The code that
plans, writes and reads is that of a run. Only one rank runs; its files and those of rank 0 are on
disk.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO, cast

from benchmarks.page import rows
from benchmarks.scale.cost import Measured, Part, in_subprocess, memory_mb, reset_peak, size, timed
from shardwise.checkpoint.format.folder import LocalFolder

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
    with tempfile.TemporaryDirectory() as name:
        # In another process, of which no free memory is left for the load.
        found = in_subprocess(save, Path(name), model, ranks)
        join(1, ranks)
        state, folder = state_of(model, ranks), CountingFolder(Path(name))
        return found | load(folder, {**state, **own_of(1)}, ranks)


def save(folder: Path, model: str, ranks: int) -> dict[str, float]:
    """Cost of a save for one rank, and what rank 0 writes for all."""
    from shardwise.checkpoint.dcp.plan import local_shards, make_plan
    from shardwise.engine.rank_tree import RankTree

    found: dict[str, float] = {}
    records = {}
    # The first plan of a process is the larger one too: rank 0 has the counts of steps.
    for rank in (0, 1):
        join(rank, ranks)
        # The fake group knows no others.
        tree = RankTree(separate=False, one_group=ranks)
        state = state_of(model, ranks)
        with _counted(found, "first_plan" if rank == 0 else "plan"):
            plan = make_plan(local_shards(state, rank, ranks), own_of(rank), tree)
        records[rank], written = write_rank(folder, plan, rank)
        found |= {"pieces": len(plan.items), **written}
    with _counted(found, "commit"):
        found |= commit(folder, plan, records, ranks)
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


def write_rank(folder: Path, plan: Any, rank: int) -> tuple[Any, dict[str, float]]:
    """Write a rank's files, of which the tensors take no room."""
    from shardwise.checkpoint.dcp.garbage import no_garbage_collection
    from shardwise.checkpoint.format.checksum import BLOCK, crc32
    from shardwise.checkpoint.format.rank_index import index_of, write_rank_index
    from shardwise.checkpoint.format.rank_table import RankRecord
    from shardwise.checkpoint.format.shard import file_of, header_of

    parts = plan.layout.parts_of(rank, plan.own)
    total = sum(part.length for part in parts)
    # As many as there are blocks; their values do not matter here.
    checksums = [2**31 + n for part in parts for n in range(-(-part.length // BLOCK))]
    found: dict[str, float] = {}
    with no_garbage_collection(), _counted(found, "write"):
        head = header_of(parts)
        index = write_rank_index(plan.own, checksums)
        (folder / index_of(rank)).write_bytes(index)
        with (folder / file_of(rank)).open("wb") as file:
            file.write(head)
            file.truncate(len(head) + total)
    found |= {"index_bytes": len(index), "written_bytes": len(head) + len(index)}
    record = RankRecord(len(head) + total, len(head), crc32(head), len(index), crc32(index))
    return record, found


def commit(folder: Path, plan: Any, records: dict[int, Any], ranks: int) -> dict[str, float]:
    """What rank 0 writes for all; other ranks have records with the same sizes."""
    from shardwise.checkpoint.format import layout, manifest, rank_table
    from shardwise.checkpoint.format.checksum import crc32
    from shardwise.checkpoint.format.manifest import FileRecord, Manifest

    rows = b"".join(rank_table.pack_record(records.get(rank, records[1])) for rank in range(ranks))
    table, listed = rank_table.write_table(rows)
    text = layout.write_layout(plan.layout)
    (folder / layout.NAME).write_bytes(text)
    (folder / rank_table.NAME).write_bytes(table)
    size = len(text)
    files = (FileRecord(name=layout.NAME, bytes=size, head=size, crc32=crc32(text)), listed)
    about = Manifest(step=1, world=ranks, sequences=0, run={}, versions={}, files=files)
    (folder / manifest.NAME).write_bytes(manifest.write_manifest(about))
    return {"layout_bytes": size, "table_bytes": len(table)}


class CountingFolder(LocalFolder):
    """Counts the bytes that are read from its files."""

    read_bytes = 0

    def open(self, name: str) -> BinaryIO:
        return cast(BinaryIO, _CountingFile(super().open(name), self))


class _CountingFile:
    def __init__(self, file: BinaryIO, folder: CountingFolder) -> None:
        self._file, self._folder = file, folder
        self.seek = file.seek

    def __enter__(self) -> _CountingFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._folder.read_bytes += len(data)
        return data


def load(folder: CountingFolder, state: Any, ranks: int) -> dict[str, float]:
    """Cost of all that rank 1 does before it reads a tensor."""
    from torch.distributed.checkpoint.default_planner import create_default_local_load_plan

    from shardwise.checkpoint.dcp.garbage import no_garbage_collection
    from shardwise.checkpoint.dcp.reader import CheckpointReader
    from shardwise.checkpoint.verify.opened import open_checkpoint

    found: dict[str, float] = {}
    with no_garbage_collection():
        # The pieces that it needs, for torch.
        with _counted(found, "load"):
            metadata = CheckpointReader(open_checkpoint(folder, 1, ranks), state).read_metadata()
        # Which bytes of which piece go where.
        with _counted(found, "torch_plan"):
            items = create_default_local_load_plan(state, metadata).items
    return {**found, "read_bytes": folder.read_bytes, "pieces_read": len(items)}


# ---- text ---------------------------------------------------------------------------------------


def table(found: list[Measured]) -> str:
    files = rows(
        [
            *("model", "ranks", "`layout.json`", "`ranks.bin`", "index of a rank"),
            *("a rank writes", "a rank reads before its tensors"),
        ],
        [
            [
                *_case(one),
                *(size(one[key]) for key in ("layout_bytes", "table_bytes", "index_bytes")),
                *(size(one[key]) for key in ("written_bytes", "read_bytes")),
            ]
            for one in found
        ],
    )
    costs = rows(
        [
            *("model", "ranks", "first plan of a save", "writing header and index"),
            *("rank 0: layout and table", "reading before a load", "torch's plan of a load"),
        ],
        [
            [
                *(*_case(one), _cost(one, "first_plan"), _cost(one, "write")),
                *(_cost(one, what) for what in ("commit", "load", "torch_plan")),
            ]
            for one in found
        ],
    )
    return files + "\n" + costs


def _case(one: Measured) -> tuple[str, str]:
    return SHORT[one.case["model"]], f"{one.case['ranks']:,}"


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
