"""Steps whose pieces take given seconds: programs of the real emitters, prices by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwise.predict.configurations import Configurations, Floats, Ints
from shardwise.predict.program.ddp import Replicated
from shardwise.predict.program.events import Cost, Event, Program, Repeat
from shardwise.predict.program.fsdp import Fsdp
from shardwise.predict.program.placement import Placement
from shardwise.predict.program.sizes import Sizes
from shardwise.predict.program.step import emit_step, rows_by_shape
from shardwise.predict.time import Times, schedule
from shardwise.units.unit import ModelUnits, Parameter, Unit

PER_BLOCK = (
    "forward", "backward", "gather", "gather_again", "scatter", "reduce", "copy_out", "copy_in",
)  # fmt: skip
SCALARS = (
    "root_forward", "root_backward", "root_gather", "root_scatter", "root_reduce", "head_reduce",
    "root_copy_out", "root_copy_in", "optimizer",
)  # fmt: skip
# Seconds by piece: (rows, blocks) for blocks, (rows,) for the rest.
Seconds = dict[str, Floats]
# By row: what each obeys.
Rules = dict[str, Any]


def uniform(blocks: int, **seconds: float) -> Seconds:
    values: Seconds = {name: np.zeros((1, blocks)) for name in PER_BLOCK}
    values |= {name: np.zeros(1) for name in SCALARS}
    for name, value in seconds.items():
        values[name] = np.full(values[name].shape, value)
    return values


def rules(**changes: Any) -> Rules:
    usual: Rules = {
        "prefetch": 1,
        "forward_prefetch": 0,
        "separate": False,
        "waits": False,
        "joins": False,
        "contention": 0.0,
        "accumulate": 1,
        "gathers_every": True,
        "scatters_every": True,
        "reduces_every": True,
    }
    return {name: np.asarray([changes.get(name, value)]) for name, value in usual.items()}


class Given:
    """Seconds by piece and unit."""

    def __init__(self, seconds: Seconds, r: Rules) -> None:
        self.seconds = seconds
        self.contention = r["contention"]

    def of(self, cost: Cost) -> Floats:
        found: Floats = getattr(self, cost.piece)(*cost.of)
        return found

    def _of(self, piece: str, unit: Unit) -> Floats:
        if unit.name == "root":
            return self.seconds[f"root_{piece}"]
        return self.seconds[piece][:, unit.numel - 3]

    def forward(self, unit: Unit) -> Floats:
        return self._of("forward", unit)

    def backward(self, unit: Unit, recomputed: Ints) -> Floats:
        return self._of("backward", unit)

    def root_backward(self) -> Floats:
        return self.seconds["root_backward"]

    def gather(self, unit: Unit) -> Floats:
        return self._of("gather", unit)

    def gather_again(self, unit: Unit) -> Floats:
        return self._of("gather_again", unit)

    def scatter(self, unit: Unit) -> Floats:
        return self._of("scatter", unit)

    def all_reduce(self, unit: Unit) -> Floats:
        return self._of("reduce", unit)

    def copy_out(self, unit: Unit) -> Floats:
        return self._of("copy_out", unit)

    def copy_in(self, unit: Unit) -> Floats:
        return self._of("copy_in", unit)

    def buckets(self, sizes: tuple[int, ...]) -> Floats:
        return sum((self._bucket(size) for size in sizes), np.zeros_like(self.optimizer()))

    def _bucket(self, bytes_: int) -> Floats:
        """Each parameter is a bucket and tells by its size whose it is."""
        elements = bytes_ // 4
        if elements <= 2:
            return self.seconds["head_reduce" if elements == 1 else "root_reduce"]
        return self.seconds["reduce"][:, elements - 3]

    def optimizer(self) -> Floats:
        return self.seconds["optimizer"]


def units_of(seconds: Seconds) -> ModelUnits:
    """A model with these blocks; those whose pieces take as long in every row are one object."""
    made: dict[bytes, Unit] = {}
    blocks = []
    for index in range(seconds["forward"].shape[1]):
        key = b"".join(
            np.ascontiguousarray(seconds[name][:, index]).tobytes() for name in PER_BLOCK
        )
        if key not in made:
            made[key] = Unit(name="block", parameters=(Parameter("w", (index + 3,)),))
        blocks.append(made[key])
    head, embedding = Parameter("head", (1,), after_blocks=True), Parameter("embedding", (2,))
    root = Unit(name="root", parameters=(embedding, head))
    return ModelUnits(name="given", seq_len=1, root=root, blocks=tuple(blocks))


def configurations(seconds: Seconds, r: Rules) -> Configurations:
    """Columns that obey the rules; rows of 8 devices, replicated where they all-reduce."""
    rows = len(seconds["optimizer"])
    ones, every = np.ones(rows, dtype=np.int64), np.ones(rows, dtype=np.bool_)
    sharded = ~np.asarray(r["joins"])
    across = (seconds["reduce"].sum(axis=1) + seconds["root_reduce"] + seconds["head_reduce"]) > 0
    return Configurations(
        shard=np.where(sharded, 8, 1),
        replicate=np.where(across, 2, 1),
        context=ones,
        tensor=ones,
        expert=ones,
        shard_stride=ones,
        replicate_stride=np.where(sharded, 8, 1),
        tensor_stride=ones,
        micro_batch=ones,
        accumulate=np.asarray(r["accumulate"]),
        param_bytes=4 * ones,
        reduce_bytes=4 * ones,
        master_bytes=4 * ones,
        update_bytes=4 * ones,
        sharded=sharded,
        ddp=~sharded,
        reshard_forward=seconds["gather_again"].sum(axis=1) > 0,
        reshard_group=0 * ones,
        reshard_backward=np.asarray(r["gathers_every"]),
        shard_sync_every=np.asarray(r["scatters_every"]),
        replicate_sync_every=np.asarray(r["reduces_every"]),
        prefetch=np.asarray(r["prefetch"]),
        forward_prefetch=np.asarray(r["forward_prefetch"]),
        split_root=~every,
        loss_chunks=ones,
        liger=~every,
        cut=~every,
        offload=~every,
        offload_optimizer=~every,
        offload_activations=~every,
        full_recompute=np.zeros(rows),
        selective=~every,
        bucket_bytes=np.full(rows, 1.0),
        wire_bytes=np.zeros(rows, dtype=int),
        powersgd_rank=np.zeros(rows, dtype=int),
    )


def emitted(seconds: Seconds, r: Rules) -> Program:
    """The program of rows that share a shape."""
    sizes = Sizes(units_of(seconds), configurations(seconds, r), "adamw")
    waits = bool(np.asarray(r["waits"]).all())
    placed: Placement
    if sizes.c.sharded[0]:
        stream = "scatter" if r["separate"][0] else "shard"
        placed = Fsdp(sizes, waits=waits, scatter_stream=stream)
    else:
        placed = Replicated(sizes, waits=waits)
    return tuple(emit_step(placed))


def simulate(seconds: Seconds, r: Rules) -> Times:
    """Times of rows, each by its own rules."""
    c = configurations(seconds, r)
    found = Times.empty((len(c),))
    for rows in rows_by_shape(c):
        for separate in (False, True):
            chosen = rows[np.asarray(r["separate"])[rows] == separate]
            if len(chosen):
                some = {name: column[chosen] for name, column in seconds.items()}
                obeyed = {name: np.asarray(column)[chosen] for name, column in r.items()}
                times = schedule(emitted(some, obeyed), (len(chosen),), Given(some, obeyed))
                found.put(chosen, times)
    return found


def unrolled(program: Program) -> list[Event]:
    """The program of one row with every repetition written out."""
    events: list[Event] = []
    for event in program:
        if isinstance(event, Repeat):
            events += unrolled(event.body) * int(event.times[0])
        else:
            events.append(event)
    return events
