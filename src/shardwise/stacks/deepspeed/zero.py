"""Keys about what is sharded, moved to host memory, and divided by other axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.stacks.outcomes import ABSENT, plain_text, repr_text
from shardwise.stacks.read.imported import Reading, boolean, subtable
from shardwise.stacks.table import DEGREE, Code, Form, Row, Table, lost_rows

# The kind of each ZeRO stage.
KINDS = ("ddp", "zero1", "zero2", "zero3")
_ZERO = "zero_optimization."
_SHARDWISE_GATHERS = "Shardwise gathers units of one block each, one unit ahead"


def stage_of(run: RunSpec) -> int:
    """The ZeRO stage, 0 to 3; ZeRO-3 that keeps parameters gathered is stage 2."""
    strategy = run.strategy
    if not strategy.sharded:
        return 0
    if strategy.kind == "zero3" and strategy.reshard_after_forward is False:
        return 2
    return KINDS.index(strategy.kind)


def _read_stage(zero: Mapping[str, object], key: str, reading: Reading) -> None:
    """Read the ZeRO stage; stage 0 is DDP."""
    stage = zero[key]
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise SpecError(f"{_ZERO}{key}: must be 0, 1, 2 or 3, not {repr_text(stage)}")
    number = int(stage)
    reading.given("ZeRO stage", {"kind": KINDS[number]}, number, naming="pair")


def _true_if_sharded(run: RunSpec) -> Any:
    return True if stage_of(run) else ABSENT


def _is_stage_3(reading: Reading) -> bool:
    return reading.strategy["kind"] == "zero3"


def _hpz_group(run: RunSpec) -> Any:
    """The group that the backward of stage 3 gathers from, which hpZ keeps a second copy for."""
    strategy, group = run.strategy, run.strategy.reshard_after_forward
    if stage_of(run) != 3:
        return ABSENT
    if strategy.hybrid:
        return strategy.shard
    return group if isinstance(group, int) and not isinstance(group, bool) else ABSENT


def _mics_group(zero: Mapping[str, object], key: str, where: str) -> Any:
    """The size of MiCS groups; without them it is -1."""
    group = zero[key]
    return group if isinstance(group, int) and group > 0 else ABSENT


def _explain_sizes(table: Mapping[str, object], reading: Reading) -> None:
    if _is_stage_3(reading):
        reading.explain("stage3_* sizes", _SHARDWISE_GATHERS)


def _read_offload(table: Mapping[str, object], reading: Reading) -> None:
    """Read offload of optimizer states or parameters to host memory or NVMe."""
    zero = subtable(table, "zero_optimization")
    where = {
        part: plain_text(subtable(zero, f"offload_{part}").get("device") or "none").lower()
        for part in ("optimizer", "param")
    }
    # Names in older files.
    names = {part: f"offload_{part}" for part in where}
    for old, part in (("cpu_offload", "optimizer"), ("cpu_offload_param", "param"),
                      ("cpu_offload_params", "param")):  # fmt: skip
        if boolean(zero, old, otherwise=False, where=_ZERO):
            where[part], names[part] = "cpu", old
    for part, device in where.items():
        if device not in ("none", "cpu", "nvme"):
            raise SpecError(
                f"{_ZERO}offload_{part}.device: {device[:40]!r} is not none, cpu or nvme"
            )
    used = {part: device for part, device in where.items() if device != "none"}
    if used and reading.strategy["kind"] == "ddp":
        reading.lose("offload", "Shardwise offloads sharded states only")
    elif used:
        _set_offload(used, " and ".join(names[part] for part in used), reading)


def _set_offload(used: Mapping[str, str], named: str, reading: Reading) -> None:
    """Set `offload` from the device of each part that is offloaded."""
    inner = any(reading.strategy.get(axis, 1) != 1 for axis in ("tensor", "context"))
    alone = [*used] == ["optimizer"] and not inner
    reading.given(named, {"offload": "optimizer" if alone else True})
    if len(used) == 1 and not alone:
        reading.lose(
            "offload",
            "Shardwise offloads parameters, gradients and optimizer states together, not only the "
            f"{'optimizer' if 'optimizer' in used else 'parameters'}",
        )
    if "nvme" in used.values():
        reading.lose("offload", "Shardwise offloads to host memory, not to NVMe")


def _write_offload(run: RunSpec) -> dict[str, Any]:
    """The keys about host memory; below stage 3 only the optimizer can be there."""
    strategy, stage = run.strategy, stage_of(run)
    parameters = strategy.offloads("parameters")
    table: dict[str, Any] = {}
    if parameters or (strategy.offloads("optimizer") and stage):
        table[f"{_ZERO}offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if parameters and stage == 3:
        table[f"{_ZERO}offload_param"] = {"device": "cpu", "pin_memory": True}
    return table


STAGE: Table = (
    Row(f"{_ZERO}stage", "kind", default=0, ours="ddp", read=_read_stage, write=stage_of),
    *(
        Row(f"{_ZERO}{key}", write=_true_if_sharded)
        for key in ("overlap_comm", "contiguous_gradients", "reduce_scatter")
    ),
    Row(
        f"{_ZERO}zero_hpz_partition_size",
        "reshard_after_forward",
        DEGREE,
        more=": the backward gathers from that many devices",
        when=_is_stage_3,
        write=_hpz_group,
    ),
    Row(
        f"{_ZERO}mics_shard_size",
        "shard",
        Form(_mics_group),
        more=", replicated over the other devices",
        when=_is_stage_3,
        write=lambda run: ABSENT,
    ),
    Row(
        f"{_ZERO}mics_shard_size",
        why="it has no effect below stage 3",
        inert=(-1,),
        when=lambda reading: not _is_stage_3(reading),
    ),
    Code(
        (f"{_ZERO}stage3_prefetch_bucket_size", f"{_ZERO}stage3_max_live_parameters",
         f"{_ZERO}stage3_param_persistence_threshold"),
        "they count elements, where Shardwise has units",
        _explain_sizes,
    ),
)  # fmt: skip
OFFLOAD = Code(
    (f"{_ZERO}offload_optimizer.device", f"{_ZERO}offload_param.device", f"{_ZERO}cpu_offload",
     f"{_ZERO}cpu_offload_param", f"{_ZERO}cpu_offload_params"),
    "both parts, and the older names, make one setting",
    _read_offload,
    _write_offload,
)  # fmt: skip
# https://www.deepspeed.ai/tutorials/autotp-training
TENSOR = Row(
    "tensor_parallel.autotp_size",
    "tensor",
    DEGREE,
    more=", without sequence parallelism",
    also={"sequence_parallel": False},
)
# DeepSpeed calls Ulysses sequence parallelism.
CONTEXT = Row(
    "sequence_parallel_size",
    "context",
    DEGREE,
    more=": Ulysses",
    also={"context_method": "ulysses"},
)
LOST: Table = (
    *lost_rows(
        dict.fromkeys(
            (f"{_ZERO}zero_quantized_weights", f"{_ZERO}zero_quantized_gradients",
             f"{_ZERO}zero_quantized_nontrainable_weights"),
            "Shardwise quantizes nothing",
        )
    ),
    Row(f"{_ZERO}zenflow", why="Shardwise does not delay the optimizer step"),
)  # fmt: skip
