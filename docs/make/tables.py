"""Tables that the tool fills when the documentation is built, and names of the public API."""

from __future__ import annotations

from itertools import product

import shardwise
from shardwise.predict import closed_form
from shardwise.predict.api import estimate_run
from shardwise.spec import catalogue
from shardwise.spec.model import ModelSpec
from shardwise.spec.question import describe_run
from shardwise.spec.run import RunSpec
from shardwise.step.profile import CollectiveProfile

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")
# What the closed form assumes: of the memory, and of the peak that kernels reach.
USABLE, EFFICIENCY = 0.9, 0.75


def public_names() -> str:
    """A block of mkdocstrings for every public name but StepProfile, which has its own page."""
    homes = [home for name, home in shardwise._HOMES.items() if name != "StepProfile"]
    return "\n\n".join(f"::: {home}" for home in homes)


def traffic_table(model: str, cluster: str, micro_batch: str, *strategies: str) -> str:
    """Bytes of one step by strategy, and what they and the memory beside them cost."""
    rows = [
        "| strategy | all-gather | reduce-scatter | all-reduce | sent per device | leaves a node "
        "| tensors at the peak | waiting |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for strategy in strategies:
        run = describe_run(model, cluster, strategy, micro_batch=int(micro_batch))
        profile = estimate_run(run)
        by_operation = [
            sum(one.sent_bytes for one in profile.traffic if one.op == op) for op in OPERATIONS
        ]
        outside = sum(one.sent_bytes * crossings(one, run) for one in profile.traffic)
        assert profile.time is not None
        waits = (profile.time.exposed_communication_s or 0.0) / profile.time.step_s
        peak = profile.known_memory
        fits = "" if peak.fits else ", does not fit"
        cells = [_gb(size) for size in (*by_operation, sum(by_operation), outside)]
        rows.append(
            f"| `{strategy}` | {' | '.join(cells)} "
            f"| {peak.peak_allocated_bytes / 2**30:,.1f} GiB{fits} | {waits:.1%} |"
        )
    return "\n".join(rows)


def crossings(one: CollectiveProfile, run: RunSpec) -> int:
    """Rings that leave a node: none of groups inside it, else one for each group that is in it."""
    per_node, shard = run.cluster.devices_per_node, run.strategy.shard or 1
    # Shard groups take neighbours, replicas stand a shard group apart.
    together = max(1, per_node // shard) if one.group == "replicate" else per_node
    members = min(one.group_size, together)
    return 0 if members == one.group_size else per_node // members


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size else ""


def mfu_table(model: str, cluster: str, strategy: str, seq_len: str, recompute: str) -> str:
    """One predicted step, and the MFU that other conventions would give it."""
    run = describe_run(model, cluster, strategy, seq_len=int(seq_len), recompute=recompute)
    profile = estimate_run(run)
    spec = run.model
    assert isinstance(spec, ModelSpec)
    assert profile.work is not None
    assert profile.throughput is not None
    per_token = profile.work.model_flops / profile.work.tokens
    # Scores and their product with values, forward and backward.
    attention = 12 * spec.layers * spec.heads * spec.head_dim * int(seq_len)
    lookup = 6 * spec.vocab * spec.hidden * (not spec.tied)
    whole = 6 * profile.model["parameters"]
    peak = run.cluster.device.peak_flops(run.strategy.param_dtype)
    assert peak is not None
    rate = profile.throughput.tokens_per_s_per_device
    again = profile.work.hardware_flops / profile.work.tokens
    rows = [
        ("**Shardwise**: matrix products and full attention, no lookup", per_token, peak),
        ("the same with causal attention", per_token - attention / 2, peak),
        ("6 x parameters without the lookup, no attention", whole - lookup, peak),
        ("6 x parameters, no attention", whole, peak),
        ("6 x parameters + full attention", whole + attention, peak),
        ("HFU: what was recomputed counts too", again, peak),
        ("Shardwise's FLOPs over the peak of sparse matrices", per_token, 2 * peak),
    ]
    lines = ["| counted | GFLOP per token | share of the peak |", "|---|---|---|"]
    lines += [
        f"| {name} | {flops / 1e9:.1f} | {flops * rate / of:.1%} |" for name, flops, of in rows
    ]
    return "\n".join(lines)


def regimes_table(device: str, devices: str, seq_len: str, *shapes: str) -> str:
    """What memory and network allow by the closed form, for models of twelve H² per block."""
    found = catalogue.find_device(device)
    peak = found.peak_flops("bf16")
    assert peak is not None
    count = int(devices)
    lines = [
        "| shape | tokens that fit | hides its gathers from | ceiling at 100 Gbps | at 200 Gbps "
        "| at 400 Gbps |",
        "|---|---|---|---|---|---|",
    ]
    for name in shapes:
        spec = catalogue.model(name)
        shape = closed_form.Shape(layers=spec.layers, hidden=spec.hidden, seq_len=int(seq_len))
        free = float(closed_form.free_bytes(shape, count, USABLE * found.memory, 3))
        if free <= 0:
            lines.append(f"| {name} | does not fit | | | | |")
            continue
        tokens = float(closed_form.most_tokens(free, shape))
        machine = closed_form.Machine(count, found.memory, 1.0, peak, efficiency=EFFICIENCY)
        # Of the batch that fits; the bandwidth is per device.
        hides = float(closed_form.hiding_bandwidth(shape, tokens, machine)) * 8 / 1e9
        ceilings = [
            float(closed_form.memory_ceiling(shape, free, gbps * 1e9 / 8, peak, count))
            for gbps in (100, 200, 400)
        ]
        cells = [f"{one:.0%}" if one < 1 else "none" for one in ceilings]
        lines.append(f"| {name} | {tokens:,.0f} | {hides:,.0f} Gbps | {' | '.join(cells)} |")
    return "\n".join(lines)


# What the table of cards asks for: a model, how it is trained, and a sequence length.
CARD_MODELS = ("mistral-7b", "llama-3.1-8b", "qwen2.5-14b", "qwen2.5-32b", "llama-3.1-70b")
CARD_TRAINING = {"full": None, "LoRA": "lora:16", "QLoRA": "qlora:16"}
CARD_LENGTHS = (2048, 8192)
CARDS = ("RTX-4090", "L40S", "H100-SXM", "H200-SXM")


def card_table() -> str:
    """The memory that one sequence takes on one card of each size, by model and training.

    Everything is recomputed and the loss is chunked: the least that one card can do.
    """
    rows = [
        f"| model | training | sequence | needs on one card | {' | '.join(CARDS)} |",
        "|---" * (4 + len(CARDS)) + "|",
    ]
    for model, (name, adapter) in product(CARD_MODELS, CARD_TRAINING.items()):
        rows += [_card_row(model, name, adapter, seq_len) for seq_len in CARD_LENGTHS]
    return "\n".join(rows)


def _card_row(model: str, training: str, adapter: str | None, seq_len: int) -> str:
    cells, needed = [], ""
    for card in CARDS:
        number, needed = _cards_needed(model, card, adapter, seq_len)
        cells.append({None: "more than 8", 1: "fits"}.get(number, f"{number} cards"))
    return f"| `{model}` | {training} | {seq_len:,} | {needed} | {' | '.join(cells)} |"


def _cards_needed(
    model: str, card: str, adapter: str | None, seq_len: int
) -> tuple[int | None, str]:
    """The fewest cards of one machine, and what a single one would need."""
    alone = ""
    for number in (1, 2, 4, 8):
        strategy = "single" if number == 1 else "zero3"
        run = describe_run(
            model,
            f"{number}x{card}",
            strategy,
            seq_len=seq_len,
            adapter=adapter,
            recompute="full",
            loss="chunked",
        )
        memory = estimate_run(run).known_memory
        alone = alone or f"{memory.needed_bytes / 2**30:,.1f} GiB"
        if memory.fits:
            return number, alone
    return None, alone
