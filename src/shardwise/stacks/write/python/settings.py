"""The constants at the top of a script."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from shardwise.spec.dtype import TORCH_NAMES, DType
from shardwise.spec.run import RunSpec
from shardwise.spec.train import DataSettings, TrainSettings
from shardwise.stacks.write.python.piece import WIDTH, Piece

OUTPUT = "trained"


def settings_piece(run: RunSpec, model: Mapping[str, object], data: Mapping[str, object]) -> Piece:
    """The constants of a run; `model` and `data` are those of model and data."""
    groups: list[tuple[str, Mapping[str, object]]] = [
        (f"The model: {plain_name(run)}.", model),
        (_step_title(run), _step(run)),
        ("The data.", data),
        ("The parallel plan.", _plan(run)),
        ("The optimizer.", _optimizer(run)),
        ("The run.", _rest(run)),
    ]
    text = "\n\n".join(_group(title, values.items()) for title, values in groups if values)
    return Piece(text, ("pathlib:Path",))


class Code(str):
    """A Python expression, written without quotes."""


def plain_name(run: RunSpec) -> str:
    """The model's name without characters that could end a comment or docstring."""
    return " ".join(re.sub(r"[^\w .:/+-]", " ", run.model.name).split())[:60] or "a model"


def train_of(run: RunSpec) -> TrainSettings:
    return run.train or TrainSettings()


def data_of(run: RunSpec) -> DataSettings:
    return run.data or DataSettings()


def on_cpu(run: RunSpec) -> bool:
    """Whether the run uses CPUs; a cluster of CPUs means CPUs even if there is a GPU."""
    kind = train_of(run).device
    return kind == "cpu" or (kind == "auto" and run.cluster.device.is_cpu)


def logged_always(run: RunSpec) -> bool:
    return train_of(run).log_every == 1


def _group(title: str, values: Iterable[tuple[str, object]]) -> str:
    written = [f"{key} = {_value(value, WIDTH - len(key) - 3)}" for key, value in values]
    return "\n".join([f"# {title}", *written])


def _value(value: object, room: int = WIDTH, indent: int = 0) -> str:
    """A constant as formatters write it: on one line if `room` is enough, else an item a line."""
    if isinstance(value, Code):
        return str(value)
    if isinstance(value, str):
        return quoted(value)
    if not isinstance(value, (dict, list)):
        return repr(value)
    brackets = "{}" if isinstance(value, dict) else "[]"
    inside = indent + 4
    items = [_item(item, WIDTH - inside - 1, inside) for item in _items(value)]
    short = f"{brackets[0]}{', '.join(items)}{brackets[1]}"
    if len(short) <= room and "\n" not in short:
        return short
    rows = [f"{' ' * inside}{item}," for item in items]
    return "\n".join([brackets[0], *rows, f"{' ' * indent}{brackets[1]}"])


def _items(value: dict[str, object] | list[object]) -> list[tuple[str | None, object]]:
    return list(value.items()) if isinstance(value, dict) else [(None, item) for item in value]


def _item(item: tuple[str | None, object], room: int, indent: int) -> str:
    name = "" if item[0] is None else f"{quoted(item[0])}: "
    return name + _value(item[1], room - len(name), indent)


def quoted(text: str) -> str:
    """A string as formatters write it: in double quotes unless that needs more escapes."""
    written = repr(text)
    if written.startswith("'") and '"' not in text:
        return f'"{written[1:-1]}"'
    return written


def torch_dtype(dtype: DType) -> str:
    return f"torch.{TORCH_NAMES[dtype]}"


def _step_title(run: RunSpec) -> str:
    tokens = run.job.tokens_per_step(run.strategy)
    return f"A step: {tokens:,} tokens on {_count(run.strategy.devices, 'process', 'es')}."


def _count(number: int, name: str, plural: str) -> str:
    return f"{number} {name}{plural if number > 1 else ''}"


def _step(run: RunSpec) -> dict[str, object]:
    return {
        "SEQ_LEN": run.job.seq_len,
        "MICRO_BATCH": run.strategy.micro_batch,
        "ACCUMULATE": run.strategy.accumulate,
    }


def _plan(run: RunSpec) -> dict[str, object]:
    strategy = run.strategy
    values: dict[str, object] = {}
    if strategy.hybrid:
        values |= {"REPLICATE": strategy.replicate, "SHARD": strategy.shard}
    elif strategy.mesh.inner > 1:
        values["SHARD"] = strategy.shard
    inner = {"CONTEXT": strategy.context, "TENSOR": strategy.tensor}
    values |= {name: degree for name, degree in inner.items() if degree > 1}
    if strategy.sharded:
        if strategy.blocks_per_unit > 1:
            values["BLOCKS_PER_UNIT"] = strategy.blocks_per_unit
        values["RESHARD_AFTER_FORWARD"] = strategy.reshard_after_forward
        if strategy.prefetch != 1:
            values["BACKWARD_PREFETCH"] = strategy.prefetch
        if strategy.forward_prefetch:
            values["FORWARD_PREFETCH"] = strategy.forward_prefetch
    if strategy.kind == "ddp" and strategy.ddp_bucket_mib is not None:
        values["BUCKET_MIB"] = strategy.ddp_bucket_mib
    if isinstance(strategy.recompute, float) and 0 < strategy.recompute < 1:
        values["RECOMPUTE_SHARE"] = strategy.recompute
    if strategy.loss == "chunked":
        values["LOSS_CHUNKS"] = strategy.loss_chunks
    return values


def _optimizer(run: RunSpec) -> dict[str, object]:
    train, kind = train_of(run), run.job.optimizer
    values: dict[str, object] = {"LEARNING_RATE": train.learning_rate}
    if train.warmup_steps:
        values["WARMUP_STEPS"] = train.warmup_steps
    if train.schedule != "constant":
        values["FINAL_SHARE"] = train.final_learning_rate
    if kind in ("adam", "adamw"):
        values |= {"BETAS": (train.beta1, train.beta2), "EPSILON": train.epsilon}
    if kind == "momentum":
        values["MOMENTUM"] = train.momentum
    values["WEIGHT_DECAY"] = train.weight_decay
    if train.clip_norm:
        values["CLIP_NORM"] = train.clip_norm
    return values


def _rest(run: RunSpec) -> dict[str, object]:
    train = train_of(run)
    values: dict[str, object] = {"STEPS": train.steps, "SEED": train.seed}
    if not logged_always(run):
        values["LOG_EVERY"] = train.log_every
    if train.checkpoint.save and train.checkpoint.every is not None:
        values["SAVE_EVERY"] = train.checkpoint.every
    if on_cpu(run) and train.threads is not None:
        values["THREADS"] = train.threads
    values["OUTPUT"] = Code(f'Path("{OUTPUT}")')
    return values
