"""Trainer overhead: its loop against a hand-written fully_shard loop and Lightning Fabric.

    python benchmarks/overhead.py [--json]

Two processes hold all loops at once, with the same model, data, seed and settings. The loops
alternate, a few steps each, in an order that changes from round to round. A second instance of the
hand-written loop shows the noise. Ratios are tokens per second within one round; above 1 is faster
than the hand-written loop.

`--instructions` counts instructions per step under callgrind instead (`apt-get install valgrind`).
Counts have no noise, even on a busy machine. The model is small, so that the loop is a large part
of a step. A ratio below 1 means fewer instructions than the hand-written loop.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Make `benchmarks` importable when this file is run as a script.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.torchrun import ROOT, run_two_ranks, send_result
from shardwise.spec.model import ModelSpec
from shardwise.trials.accept.overhead import (
    AGAIN,
    BARE,
    OURS,
    STEPS,
    Loop,
    Work,
    bare_loop,
    hand_written_means,
    plain_loop,
    take_turns,
    trainer_loop,
)

ROUNDS = 25
SEQ_LEN, MICRO_BATCH = 256, 2
CONTESTANTS = (BARE, AGAIN, OURS, "fabric")


def spec() -> ModelSpec:
    sizes = {"layers": 6, "hidden": 256, "heads": 4, "ffn": 704, "vocab": 2048}
    if "--small" in sys.argv:
        sizes |= {"hidden": 32, "heads": 2, "ffn": 64, "vocab": 256}
    return ModelSpec.read({"family": "llama", "max_positions": SEQ_LEN, **sizes})


def fabric(work: Work) -> Loop:
    """Lightning Fabric around the same fully_shard calls."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    from shardwise.engine.mesh import world

    def shard(model: Any, mesh: Any) -> Any:
        for block in model.model.layers:
            fully_shard(block, mesh=mesh["data_parallel"])
        fully_shard(model, mesh=mesh["data_parallel"], reshard_after_forward=False)
        return model

    strategy = ModelParallelStrategy(
        parallelize_fn=shard, data_parallel_size=world()[1], tensor_parallel_size=1
    )
    launcher = Fabric(accelerator="cpu", devices=world()[1], strategy=strategy)
    launcher.launch()
    model = launcher.setup(work.module())
    return plain_loop(model, work, launcher.backward, launcher.setup_optimizers)


MAKERS: dict[str, Callable[[Work], Loop]] = {
    BARE: bare_loop,
    AGAIN: bare_loop,
    OURS: trainer_loop,
    "fabric": fabric,
}


def worker(names: list[str], rounds: int) -> None:
    """Alternate between the loops; rank 0 prints the seconds per step of every turn."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    device = torch.device("cpu")
    work = Work(spec(), SEQ_LEN, MICRO_BATCH, (rounds + 2) * STEPS, device)
    running = {}
    for name in names:
        try:
            running[name] = MAKERS[name](work)
        except ModuleNotFoundError as error:
            if dist.get_rank() == 0:
                print(f"skipped {name}: {error.name} is not installed", file=sys.stderr)
    found = list(take_turns(running, rounds, device))
    if dist.get_rank() == 0:
        send_result({name: [one[name] for one in found] for name in running})
    dist.barrier()
    os._exit(0)


def instructions(name: str) -> float:
    """Instructions per step of a small model, from the difference of a long and a short run.

    Counted under callgrind, in one process: slow, but without noise.
    """
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    counts = []
    for number, rounds in enumerate((1, 3)):
        port = str(29_600 + 2 * CONTESTANTS.index(name) + number)
        command = [
            *("valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable),
            *(str(Path(__file__)), "--worker", "--small", "--only", name, "--rounds", str(rounds)),
        ]
        environment = {
            **os.environ,
            **alone,
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": str(ROOT),
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        lines = [line for line in done.stderr.splitlines() if "Collected :" in line]
        if not lines:
            sys.exit(done.stderr[-3000:])
        counts.append(int(lines[-1].split()[-1]))
    return (counts[1] - counts[0]) / (2 * STEPS)


def report_instructions(*, as_json: bool) -> None:
    counts = {name: instructions(name) for name in ("bare", "shardwise")}
    ratio = counts["shardwise"] / counts["bare"]
    if as_json:
        print(json.dumps({"instructions_per_step": counts, "instructions_ratio": ratio}, indent=2))
        return
    for name, count in counts.items():
        print(f"{name:12} {count:.6g} instructions per step")
    print(f"{'ratio':12} {ratio:.4f}")


def _base(name: str, seconds: dict[str, list[float]], usual: list[float]) -> list[float]:
    return seconds["bare"] if name == "bare again" else usual


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--instructions",
        action="store_true",
        help="count instructions per step under callgrind instead (half an hour)",
    )
    options = parser.parse_args()
    if options.worker:
        worker([options.only] if options.only else list(CONTESTANTS), options.rounds)
        return
    if options.instructions:
        report_instructions(as_json=options.json)
        return
    arguments = ("--worker", "--rounds", str(options.rounds))
    seconds: dict[str, list[float]] = run_two_ranks(__file__, *arguments)
    # The two hand-written instances together are the baseline; their ratio is the noise.
    usual = hand_written_means(seconds)
    ratios = {
        name: [base / own for base, own in zip(_base(name, seconds, usual), taken, strict=True)]
        for name, taken in seconds.items()
        if name != "bare"
    }
    tokens = SEQ_LEN * MICRO_BATCH * 2
    result: dict[str, Any] = {
        "rounds": options.rounds,
        "tokens_per_s": {n: tokens / statistics.median(s) for n, s in seconds.items()},
        "ratio_median": statistics.median(ratios["shardwise"]),
        "ratios": {
            n: {
                "median": statistics.median(r),
                "quartiles": [sorted(r)[len(r) // 4], sorted(r)[3 * len(r) // 4]],
            }
            for n, r in ratios.items()
        },
    }
    if options.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{options.rounds} rounds of {STEPS} steps, 2 processes, measured")
    for name, rate in result["tokens_per_s"].items():
        ratio = result["ratios"].get(name)
        shown = ""
        if ratio:
            low, high = ratio["quartiles"]
            shown = f"  {ratio['median']:.3f} of bare ({low:.3f} to {high:.3f})"
        print(f"{name:12} {rate:8,.0f} tokens/s{shown}")


if __name__ == "__main__":
    main()
