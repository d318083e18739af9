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
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

# Make `benchmarks` importable when this file is run as a script.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.torchrun import ROOT, run_two_ranks, send_result

ROUNDS, STEPS = 25, 3
SEQ_LEN, MICRO_BATCH = 256, 2
CONTESTANTS = ("bare", "bare again", "shardwise", "fabric")


def spec() -> Any:
    from shardwise.spec import ModelSpec

    sizes = {"layers": 6, "hidden": 256, "heads": 4, "ffn": 704, "vocab": 2048}
    if "--small" in sys.argv:
        sizes |= {"hidden": 32, "heads": 2, "ffn": 64, "vocab": 256}
    return ModelSpec.read({"family": "llama", "max_positions": SEQ_LEN, **sizes})


def module() -> Any:
    """Build the model, with the same weights for every loop."""
    import torch

    from shardwise.units.build import build_module

    torch.manual_seed(0)
    return build_module(spec())


def batches() -> Any:
    from shardwise.engine.mesh import world
    from shardwise.train.batches import Layout, SyntheticBatches

    rank, size = world()
    return SyntheticBatches(Layout(rank, size, MICRO_BATCH, 1, SEQ_LEN), spec().vocab, 0)


def settings(steps: int) -> Any:
    from shardwise.spec.train import TrainSettings

    return TrainSettings(steps=steps, log_every=10, measure=False)


def bare(total: int) -> Callable[[int], None]:
    """A careful hand-written fully_shard loop."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.functional import cross_entropy

    model = module()
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model, reshard_after_forward=False)
    return _plain_loop(model, torch.optim.AdamW, cross_entropy, total)


def _plain_loop(
    model: Any,
    optimizer_class: Any,
    cross_entropy: Any,
    total: int,
    backward: Callable[[Any], None] | None = None,
    setup: Callable[[Any], Any] = lambda optimizer: optimizer,
) -> Callable[[int], None]:
    import torch
    import torch.distributed as dist

    chosen = settings(total)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = setup(optimizer_class(groups, lr=3e-4, betas=(0.9, 0.95), fused=True))
    data = batches()
    state = {"step": 0}

    def run(steps: int) -> None:
        for _ in range(steps):
            batch = data.at(state["step"])[0]
            logits = model(input_ids=batch.inputs).logits
            loss = cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten())
            del logits
            if backward is None:
                loss.backward()
            else:
                backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = chosen.learning_rate_at(state["step"])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            state["step"] += 1
            if state["step"] % 10 == 0:
                mean = loss.detach()
                dist.all_reduce(mean)
                mean.item()

    return run


def fabric(total: int) -> Callable[[int], None]:
    """Lightning Fabric around the same fully_shard calls."""
    import torch
    from lightning.fabric import Fabric
    from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard
    from torch.nn.functional import cross_entropy

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
    model = launcher.setup(module())
    return _plain_loop(
        model,
        torch.optim.AdamW,
        cross_entropy,
        total,
        backward=launcher.backward,
        setup=launcher.setup_optimizers,
    )


def ours(total: int) -> Callable[[int], None]:
    from shardwise.engine.device import local_device
    from shardwise.engine.parallelize import parallelize
    from shardwise.spec import Strategy
    from shardwise.train.loop import Training, train
    from shardwise.train.optimizer import make_optimizer

    strategy = Strategy(kind="zero3", param_dtype="fp32", micro_batch=MICRO_BATCH)
    model = parallelize(module(), strategy)
    chosen = settings(total)
    training = Training(
        model=model,
        optimizer=make_optimizer(model, "adamw", chosen),
        batches=batches(),
        settings=chosen,
        device=local_device("cpu"),
    )

    class Silent:
        def step(self, step: int) -> Any:
            return nullcontext()

        def logged(self, line: Any) -> None:
            pass

    return lambda steps: (train(training, Silent(), until=training.step + steps), None)[1]


MAKERS: dict[str, Callable[[int], Callable[[int], None]]] = {
    "bare": bare,
    "bare again": bare,
    "shardwise": ours,
    "fabric": fabric,
}


def worker(names: list[str], rounds: int) -> None:
    """Alternate between the loops; rank 0 prints the seconds per step of every turn."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    total = (rounds + 2) * STEPS
    running = {}
    for name in names:
        try:
            running[name] = MAKERS[name](total)
        except ModuleNotFoundError as error:
            if dist.get_rank() == 0:
                print(f"skipped {name}: {error.name} is not installed", file=sys.stderr)
    seconds: dict[str, list[float]] = {name: [] for name in running}
    for run in running.values():
        run(STEPS)  # warm-up
    for number in range(rounds):
        turn = number % len(running)
        order = [*running][turn:] + [*running][:turn]
        for name in order if number % 2 else reversed(order):
            dist.barrier()
            begin = time.perf_counter()
            running[name](STEPS)
            dist.barrier()
            seconds[name].append((time.perf_counter() - begin) / STEPS)
    if dist.get_rank() == 0:
        send_result(seconds)
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
    pairs = zip(seconds["bare"], seconds["bare again"], strict=True)
    usual = [math.sqrt(one * other) for one, other in pairs]
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
