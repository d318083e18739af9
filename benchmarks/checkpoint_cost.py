"""What verification costs: checkpoints of ours against torch's own, which verifies nothing.

    python benchmarks/checkpoint_cost.py [--json] [--size-mb 400] [--rounds 5]

Two processes hold one model under fully_shard with its AdamW state, and save and load it both ways
in turn, in an order that changes from round to round. Both saves are on the device when they
return; torch writes with its defaults into a new folder. Ratios are of seconds within one round,
below 1 is faster than torch; medians, with the lowest and the highest.

`async_block_ratio` is the time for which a save in the background holds up the caller, who computes
for a second between beginning it and changing the tensors, as part of a save at once. `fsck_ratio`
is the rate of `shardwise fsck` as part of the least there is: reading the same files and hashing
them, both in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Started as a file, its neighbours are not yet importable.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.torchrun import tell, told_by

LAYERS, COMPUTE_S = 8, 1.0
WHAT = {
    "save_ratio": "save, of torch's time",
    "load_ratio": "load, of torch's time",
    "async_block_ratio": "background save blocks, of a save at once",
    "fsck_ratio": "fsck, of the rate of reading and hashing",
}


class Bench:
    """One model and its optimizer, saved and loaded both ways."""

    def __init__(self, folder: Path, size_mb: int) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        from shardwise.checkpoint.dcp import state
        from shardwise.checkpoint.dcp.save import Saver
        from shardwise.checkpoint.format.place import find_place

        self._torch, self._dist, self._state = torch, dist, state
        # A parameter and two moments, in fp32.
        width = int((size_mb * 1e6 / 12 / LAYERS) ** 0.5)
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            *(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS))
        )
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.model(torch.randn(2, width)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.tensors = state.updated(self.model, self.optimizer)
        self.folder = folder
        self.place = find_place(str(folder / "ours"))
        self.at_once = Saver(self.place, keep=0, background=False)
        self.behind = Saver(find_place(str(folder / "behind")), keep=0, background=True)
        self.step = 0

    def save_torch(self) -> None:
        from torch.distributed.checkpoint import FileSystemWriter, save

        save(self.tensors, storage_writer=FileSystemWriter(self.folder / f"torch-{self.step}"))

    def save_ours(self) -> None:
        self.at_once.save(self.tensors, {}, self._about())
        self.at_once.wait()

    def load_torch(self) -> None:
        from torch.distributed.checkpoint import FileSystemReader, load

        load(self.tensors, storage_reader=FileSystemReader(self.folder / f"torch-{self.step}"))

    def load_ours(self) -> None:
        from shardwise.checkpoint.dcp.load import load_last

        loaded = load_last(self.place, lambda *_: self.tensors)
        assert loaded is not None
        assert (loaded.manifest.step, loaded.skipped) == (self.step, [])

    def save_behind(self) -> float:
        """For how long the caller could not go on, on the rank that waited longest."""
        begin = time.perf_counter()
        self.behind.save(self.tensors, {}, self._about())
        began = time.perf_counter()
        self._compute()
        done = time.perf_counter()
        self.behind.wait_until_copied()
        blocked = (began - begin) + (time.perf_counter() - done)
        self.behind.wait()
        found = [0.0] * self._dist.get_world_size()
        self._dist.all_gather_object(found, blocked)
        return max(found)

    def _compute(self) -> None:
        torch = self._torch
        one = torch.ones(512, 512)
        end = time.perf_counter() + COMPUTE_S
        while time.perf_counter() < end:
            one = (one @ one).tanh()

    def _about(self) -> Any:
        from shardwise.checkpoint.format.manifest import Manifest

        world = self._dist.get_world_size()
        return Manifest(step=self.step, world=world, sequences=0, run={}, versions={})

    def timed(self, action: Callable[[], None]) -> float:
        """What was written before is on the device already, and is nobody's cost here."""
        self.quiet()
        begin = time.perf_counter()
        action()
        self._dist.barrier()
        return time.perf_counter() - begin

    def quiet(self) -> None:
        if self._dist.get_rank() == 0:
            os.sync()
        self._dist.barrier()

    def clear(self, keep: bool) -> None:
        """All but the last of ours, which others read."""
        self._dist.barrier()
        if self._dist.get_rank() == 0:
            shutil.rmtree(self.folder / f"torch-{self.step}")
            shutil.rmtree(self.folder / "behind")
            if not keep:
                shutil.rmtree(self.folder / "ours")
        self._dist.barrier()

    def turn(self, number: int) -> dict[str, float]:
        self.step = number + 1
        pairs = [
            [("save_torch", self.save_torch), ("save_ours", self.save_ours)],
            [("load_torch", self.load_torch), ("load_ours", self.load_ours)],
        ]
        found = {}
        for pair in pairs:
            for name, action in pair if number % 2 else reversed(pair):
                found[name] = self.timed(action)
        self.quiet()
        found["blocked"] = self.save_behind()
        return found


def worker(folder: Path, size_mb: int, rounds: int) -> None:
    """Take turns; rank 0 prints the seconds of every one."""
    import warnings

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    bench = Bench(folder, size_mb)
    bench.turn(0)  # warm-up
    bench.clear(keep=False)
    turns = []
    for number in range(1, rounds + 1):
        turns.append(bench.turn(number))
        bench.clear(keep=number == rounds)
    if dist.get_rank() == 0:
        tell(turns)
    dist.barrier()
    dist.destroy_process_group()


def time_fsck(folder: Path, rounds: int) -> list[dict[str, float]]:
    """Seconds of reading and hashing, and of fsck, in turn."""
    from shardwise.checkpoint.format.checksum import crc32
    from shardwise.checkpoint.format.folder import LocalFolder
    from shardwise.checkpoint.verify.fsck import check

    def floor() -> None:
        buffer = memoryview(bytearray(2**20))
        for path in folder.iterdir():
            with path.open("rb", buffering=0) as file:
                value = 0
                while count := file.readinto(buffer):
                    value = crc32(buffer[:count], value)

    def fsck() -> None:
        assert check(LocalFolder(folder), processes=1).verified

    turns: list[dict[str, float]] = []
    for number in range(rounds + 1):
        found = {}
        for action in (floor, fsck) if number % 2 else (fsck, floor):
            begin = time.perf_counter()
            action()
            found[action.__name__] = time.perf_counter() - begin
        turns.append(found)
    return turns[1:]


def measure(size_mb: int, rounds: int, within: str | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=within) as name:
        folder = Path(name)
        settings = ("--size-mb", str(size_mb), "--rounds", str(rounds))
        turns: list[dict[str, float]] = told_by(__file__, "--worker", name, *settings)
        (last,) = (folder / "ours").glob("step-*")
        checks = time_fsck(last, rounds)
    ratios = {
        "save_ratio": [t["save_ours"] / t["save_torch"] for t in turns],
        "load_ratio": [t["load_ours"] / t["load_torch"] for t in turns],
        "async_block_ratio": [t["blocked"] / t["save_ours"] for t in turns],
        "fsck_ratio": [c["floor"] / c["fsck"] for c in checks],
    }
    seconds = {key: statistics.median(t[key] for t in turns) for key in turns[0]}
    seconds |= {key: statistics.median(c[key] for c in checks) for key in checks[0]}
    return {
        "size_mb": size_mb,
        "rounds": rounds,
        **{key: statistics.median(found) for key, found in ratios.items()},
        "spreads": {key: [min(found), max(found)] for key, found in ratios.items()},
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--size-mb", type=int, default=400, help="of model and optimizer state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--within", help="a folder on the disk to measure on")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(Path(options.worker), options.size_mb, options.rounds)
        return
    result = measure(options.size_mb, options.rounds, options.within)
    if options.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{options.size_mb} MB, {options.rounds} rounds, 2 processes, measured")
    for key, words in WHAT.items():
        low, high = result["spreads"][key]
        print(f"{result[key]:6.3f} ({low:.3f} to {high:.3f})  {words}")
    listed = ", ".join(f"{key} {value:.3f}" for key, value in result["seconds"].items())
    print(f"median seconds: {listed}")


if __name__ == "__main__":
    main()
