"""Compare plans of random jobs with a brute-force search over everything a plan may choose.

    python benchmarks/brute_force.py [--jobs 500] [--seed 0] [--part 0/1] [--json]

A job is a random model, cluster, sequence length and batch. The brute force prices every placement
with every micro-batch within the batch tolerance, every share of recompute and every value of
prefetch, forward prefetch and blocks per unit. It leaves out what cannot fit: a micro-batch whose
smallest settings (full recompute, least prefetch, one block per unit) do not.

Printed: the throughput of each plan relative to the best of brute force (the MFU ratio, because
both train the same model), the worst of all jobs, and jobs that brute force fits and the plan does
not; with --json, a line per job as soon as it is done. Models have few blocks so that 500 jobs take
minutes; their widths are those of real ones.
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import product
from typing import NamedTuple

import numpy as np

from shardwise.planning.batches import batches
from shardwise.planning.problem import Problem, Units, peaks, steps, times
from shardwise.planning.rows import Rows
from shardwise.planning.search import Search
from shardwise.planning.space import Space, placements
from shardwise.predict.estimate import usable_bytes
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import Job
from shardwise.spec.lookup import find_cluster, find_model
from shardwise.spec.model import ModelSpec
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy

# A plan may be this much slower than the best of brute force.
ALLOWED = 0.10
# Without a global batch, brute force stops at this micro-batch; a plan may go higher.
MOST_SEQUENCES = 48
DEVICES = ("A100-40GB", "A100-80GB", "H100-SXM", "H200-SXM", "L40S", "RTX-4090", "V100-SXM2-32GB")
NETWORKS = (10, 25, 50, 100, 200, 400)
WIDTHS = (512, 768, 1024, 2048, 4096, 5120, 8192)


class Outcome(NamedTuple):
    """One job, the throughput of its plan relative to the best of brute force, and both."""

    job: str
    rows: int
    # None if brute force finds no configuration that fits.
    ratio: float | None
    # Brute force finds a configuration that fits and the plan does not.
    failed: bool
    plan: str
    best: str


def random_model(rng: random.Random) -> ModelSpec:
    """A decoder with the width of a real one and few blocks."""
    base = find_model(rng.choice(("gpt2", "llama-3-8b", "llama-2-7b")))
    assert isinstance(base, ModelSpec)
    width = rng.choice(WIDTHS)
    heads = max(1, width // 128)
    ffn = int(width * rng.choice((2.7, 3.5, 4)) / 64) * 64
    layers = rng.randint(2, 8)
    changed = base.but(
        name=f"{base.family} {layers} x {width}",
        layers=layers,
        hidden=width,
        heads=heads,
        kv_heads=heads if base.family == "gpt2" else max(1, heads // rng.choice((1, 2, 4))),
        head_dim=width // heads,
        ffn=ffn,
        max_positions=16384,
    )
    assert isinstance(changed, ModelSpec)
    return changed


def random_cluster(rng: random.Random) -> ClusterSpec:
    """One to six nodes of one to eight devices."""
    device, size = rng.choice(DEVICES), rng.choice((1, 2, 4, 8, 8))
    nodes = rng.choice((1, 1, 2, 3, 4, 6)) if size > 1 else 1
    network = f"@{rng.choice(NETWORKS)}Gbps" if nodes > 1 else ""
    return find_cluster(f"{nodes}x{size}x{device}{network}")


def random_problem(rng: random.Random) -> Problem:
    """A model, a cluster, and a batch that may or may not divide evenly."""
    model, cluster = random_model(rng), random_cluster(rng)
    seq_len = rng.choice((512, 1024, 2048, 4096, 8192, 16384))
    sequences = rng.choice((rng.uniform(0.8, 8), rng.uniform(1, 48), rng.randint(1, 40)))
    tokens = round(sequences * seq_len * cluster.devices)
    job = Job(seq_len=seq_len, global_batch=tokens if rng.random() < 0.8 else None)
    dtype = "bf16" if cluster.device.peak_flops("bf16") else "fp16"
    return Problem(model, cluster, job, Strategy(kind="zero3", param_dtype=dtype))


class Best(NamedTuple):
    """The fastest of brute force that fits, and how many rows were priced."""

    tokens_per_s: float
    strategy: Strategy | None
    rows: int


def brute_force(problem: Problem, space: Space) -> Best:
    """Price the complete cross product, without what cannot fit."""
    units, limit = Units(problem), usable_bytes(problem.cluster.device)
    sizes = batches(problem.job, problem.cluster, tolerance=space.batch_tolerance)
    sizes = [size for size in sizes if size.micro_batch <= MOST_SEQUENCES]
    accumulates = any(size.accumulate > 1 for size in sizes)
    best, fastest, count = None, 0.0, 0
    split = units.can_split
    laid_out = placements(problem.cluster, problem.base, accumulates, space, split_root=split)
    for placement in (one.but(loss=loss) for loss in space.losses for one in laid_out):
        least = placement.but(prefetch=min(space.prefetch)) if placement.sharded else placement
        rows = Rows.product([least], sizes, ("full",))
        if not len(rows.which):
            rows = Rows.product([least], [s for s in sizes if s.accumulate > 1], ("full",))
        _, needed = peaks(steps(units.of(least), rows.columns, problem), problem)
        fitting = set(rows.columns.micro_batch[needed <= limit].tolist())
        count += len(needed)
        kept = [size for size in sizes if size.micro_batch in fitting]
        if not kept:
            continue
        for blocks in space.blocks_per_unit if placement.sharded else (1,):
            strategies = _settings(placement, space, blocks)
            rows = Rows.product(strategies, kept, space.recompute)
            whole = units.of(strategies[0])
            _, needed = peaks(steps(whole, rows.columns, problem), problem)
            count += len(needed)
            rows = rows.take(np.flatnonzero(needed <= limit))
            if not len(rows.which):
                continue
            c = rows.columns
            priced = steps(whole, c, problem)
            found = times(priced, problem.cluster, problem.base.param_dtype)
            tokens = c.micro_batch * c.accumulate * c.shard * c.replicate * problem.job.seq_len
            speed = tokens / found.step_s
            row = int(speed.argmax())
            if speed[row] > fastest:
                fastest, best = float(speed[row]), rows.strategy(row)
    return Best(fastest, best, count)


def _settings(placement: Strategy, space: Space, blocks: int) -> list[Strategy]:
    if not placement.sharded:
        return [placement]
    return [
        placement.but(prefetch=ahead, forward_prefetch=forward, blocks_per_unit=blocks)
        for ahead, forward in product(space.prefetch, space.forward_prefetch)
    ]


def compare(problem: Problem) -> Outcome:
    """The plan of a problem against brute force."""
    space = Space()
    best = brute_force(problem, space)
    chosen = Search(problem, space).run().best()
    job = problem.job
    batch = f"batch {job.global_batch:,}" if job.global_batch else "any batch"
    return Outcome(
        job=f"{problem.model.name} on {problem.cluster}, {job.seq_len:,} tokens, {batch}",
        rows=best.rows,
        ratio=chosen.tokens_per_s / best.tokens_per_s if chosen and best.strategy else None,
        failed=chosen is None and best.strategy is not None,
        plan=repr(chosen),
        best=_text(best),
    )


def _text(best: Best) -> str:
    s = best.strategy
    if s is None:
        return "no configuration fits"
    return (
        f"{s}, micro-batch {s.micro_batch} × {s.accumulate}, recompute {s.recompute}, prefetch "
        f"{s.prefetch}, forward prefetch {s.forward_prefetch}, {s.blocks_per_unit} blocks per "
        f"unit, grad_sync {s.grad_sync}: {best.tokens_per_s:,.0f} tokens/s"
    )


def random_problems(jobs: int, seed: int) -> list[Problem]:
    """Problems that can be planned: the batch has at least a sequence for every device."""
    rng = random.Random(seed)
    found: list[Problem] = []
    while len(found) < jobs:
        problem = random_problem(rng)
        try:
            batches(problem.job, problem.cluster)
        except SpecError:
            continue
        found.append(problem)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="0/1", help="every n-th job, starting with the i-th: i/n")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    first, step = (int(number) for number in options.part.split("/"))
    problems = random_problems(options.jobs, options.seed)[first::step]
    outcomes = []
    for problem in problems:
        outcomes.append(compare(problem))
        if options.json:
            print(json.dumps(outcomes[-1]._asdict()), flush=True)
    if options.json:
        return
    ratios = sorted((o.ratio, o) for o in outcomes if o.ratio is not None)
    failed = [o for o in outcomes if o.failed]
    below = [o for ratio, o in ratios if ratio < 1 - ALLOWED]
    nothing = sum(o.ratio is None and not o.failed for o in outcomes)
    print(f"{len(outcomes)} jobs, {sum(o.rows for o in outcomes):,} configurations by brute force")
    print(f"no configuration fits, by brute force or plan: {nothing}")
    print(f"brute force finds a configuration that fits, the plan none: {len(failed)}")
    print(f"plan more than {ALLOWED:.0%} below the best: {len(below)}")
    if ratios:
        median = ratios[len(ratios) // 2][0]
        print(f"throughput of plan / best: worst {ratios[0][0]:.3f}, median {median:.3f}")
    for ratio, outcome in ratios[:3]:
        print(f"  {ratio:.3f} {outcome.job}\n    plan {outcome.plan}\n    best {outcome.best}")
    for outcome in failed:
        print(f"  failed: {outcome.job}\n    best {outcome.best}")
    raise SystemExit(1 if failed or below else 0)


if __name__ == "__main__":
    main()
