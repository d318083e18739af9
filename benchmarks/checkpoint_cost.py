"""Cost of verified checkpoints compared with torch's own, which are not verified.

    python benchmarks/checkpoint_cost.py [--json] [--size-mb 400] [--rounds 5]

Two processes hold one model under fully_shard with its AdamW state. They save and load it with
Shardwise and with torch, in an order that changes from round to round. Both saves are on disk when
they return; torch writes with its defaults to a new folder. Ratios compare seconds within one
round; below 1 is faster than torch. Printed: medians, with the lowest and the highest.

`async_block_ratio` is the time that a background save blocks its caller, relative to a blocking
save. The caller computes for one second between the start of the save and the next change of the
tensors. `fsck_ratio` is the rate of `shardwise fsck` relative to only reading and hashing the same
files, both in one process.
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

# Make `benchmarks` importable when this file is run as a script.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.torchrun import run_two_ranks, send_result

LAYERS, COMPUTE_S = 8, 1.0
WHAT = {
    "save_ratio": "save time / torch's save time",
    "load_ratio": "load time / torch's load time",
    "async_block_ratio": "time blocked by a background save / time of a blocking save",
    "fsck_ratio": "fsck rate / rate of reading and hashing",
}


class Bench:
    """One model and its optimizer, saved and loaded by Shardwise and by torch."""

    def __init__(self, folder: Path, size_mb: int) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        from shardwise.checkpoint.dcp import state
        from shardwise.checkpoint.dcp.save import Saver
        from shardwise.checkpoint.format.storage import find_storage

        self._torch, self._dist, self._state = torch, dist, state
        # 12 bytes per parameter: itself and two moments, in fp32.
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
        self.tensors = state.updated_tensors(self.model, self.optimizer)
        self.folder = folder
        self.place = find_storage(str(folder / "ours"))
        self.at_once = Saver(self.place, keep=0, background=False)
        self.behind = Saver(find_storage(str(folder / "behind")), keep=0, background=True)
        self.step = 0

    def save_torch(self) -> None:
        from torch.distributed.checkpoint import FileSystemWriter, save

        save(self.tensors, storage_writer=FileSystemWriter(self.folder / f"torch-{self.step}"))

    def save_ours(self) -> None:
        self.at_once.save(self.tensors, {}, {}, self._about())
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
        """Seconds that a background save blocks its caller, on the slowest rank."""
        begin = time.perf_counter()
        self.behind.save(self.tensors, {}, {}, self._about())
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
        """Seconds of an action; earlier writes are flushed first and not counted."""
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
        """Delete the checkpoints; with `keep`, leave Shardwise's for `time_fsck`."""
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
    """Run all rounds; rank 0 prints the seconds of every action."""
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
        send_result(turns)
    dist.barrier()
    dist.destroy_process_group()


def time_fsck(folder: Path, rounds: int) -> list[dict[str, float]]:
    """Seconds of reading and hashing, and of fsck, in alternating order."""
    from shardwise.checkpoint.format.checksum import crc32
    from shardwise.checkpoint.format.folder import LocalFolder
    from shardwise.checkpoint.verify.fsck import verify_checkpoint

    def floor() -> None:
        buffer = memoryview(bytearray(2**20))
        for path in folder.iterdir():
            with path.open("rb", buffering=0) as file:
                value = 0
                while count := file.readinto(buffer):
                    value = crc32(buffer[:count], value)

    def fsck() -> None:
        assert verify_checkpoint(LocalFolder(folder), processes=1).verified

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
        turns: list[dict[str, float]] = run_two_ranks(__file__, "--worker", name, *settings)
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
    parser.add_argument(
        "--size-mb", type=int, default=400, help="size of model and optimizer state"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--within", help="folder on the disk to measure")
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
