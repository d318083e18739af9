"""Keys about the batch, gradient clipping, the optimizer and the learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.spec.optimizer import Optimizer
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.stacks.deepspeed.precision import AUTO
from shardwise.stacks.outcomes import ABSENT, Outcome, plain_text
from shardwise.stacks.read.imported import (
    Reading,
    boolean,
    finite_number,
    list_unknown,
    positive_integer,
    set_optimizer,
    set_warmup,
    subtable,
)
from shardwise.stacks.table import Code, Row, Table

# DeepSpeed's Adam is AdamW unless adam_w_mode is false.
OPTIMIZERS: dict[Optimizer, tuple[str, dict[str, object]]] = {
    "adamw": ("AdamW", {}),
    "adam": ("Adam", {"adam_w_mode": False}),
    "lion": ("Lion", {}),
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {}),
}
_OPTIMIZER_PARAMS = ("lr", "betas", "eps", "weight_decay", "momentum", "bias_correction",
                     "torch_adam", "fused")  # fmt: skip
_SCHEDULES = {"WarmupLR": "constant", "WarmupCosineLR": "cosine", "WarmupDecayLR": "linear"}
_SCHEDULER_PARAMS = ("total_num_steps", "warmup_num_steps", "warmup_type", "cos_min_ratio",
                     "warmup_min_ratio", "warmup_min_lr", "warmup_max_lr",
                     "last_batch_iteration")  # fmt: skip


def _read_batch(table: Mapping[str, object], reading: Reading) -> None:
    """Read micro-batch and accumulation; compute the number of processes from the global batch."""
    batch = positive_integer(table, "train_batch_size")
    micro = positive_integer(table, "train_micro_batch_size_per_gpu")
    accumulate = positive_integer(table, "gradient_accumulation_steps")
    if accumulate is None and table.get("gradient_accumulation_steps") != "auto" and micro:
        # A global batch and the device count determine it, but the count is not in the file.
        accumulate = 1 if batch is None else None
    if micro:
        reading.given("train_micro_batch_size_per_gpu", {"micro_batch": micro})
    else:
        reading.lose("micro_batch", "train_micro_batch_size_per_gpu is not a number in this file")
    if accumulate:
        absent = table.get("gradient_accumulation_steps") is None
        settles = reading.default if absent else reading.given
        settles("gradient_accumulation_steps", {"accumulate": accumulate})
    else:
        reading.lose("accumulate", "gradient_accumulation_steps is not a number in this file")
    if batch and micro and accumulate:
        _set_processes(batch, micro * accumulate, reading)


def _set_processes(batch: int, per_device: int, reading: Reading) -> None:
    """Set the number of processes from the sequences of a step, in all and per data-parallel rank.

    Each sequence is on tensor × context devices.
    """
    if batch % per_device:
        raise SpecError(
            f"train_batch_size: {batch} is no multiple of train_micro_batch_size_per_gpu x "
            f"gradient_accumulation_steps = {per_device}"
        )
    reading.processes = batch // per_device
    for axis in ("tensor", "context"):
        degree = reading.strategy.get(axis, 1)
        assert isinstance(degree, int)
        reading.processes *= degree
    if reading.processes == 1 and reading.strategy["kind"] == "ddp":
        reading.strategy["kind"] = "single"


def _write_batch(run: RunSpec) -> dict[str, Any]:
    strategy = run.strategy
    return {
        "train_batch_size": strategy.micro_batch * strategy.accumulate * strategy.data_parallel,
        "train_micro_batch_size_per_gpu": strategy.micro_batch,
        "gradient_accumulation_steps": strategy.accumulate,
    }


def _read_clipping(table: Mapping[str, object], reading: Reading) -> None:
    """Read gradient clipping; without an optimizer in the file the script may clip."""
    key = "gradient_clipping"
    clip = finite_number(table, key)
    if table.get(key) == "auto":
        reading.lose(key, AUTO)
    elif clip is not None:
        reading.train["clip_norm"] = clip
    elif table.get("optimizer") and key not in table:
        reading.default(key, {"train.clip_norm": CLIPPING.defaults[key]})


def _write_clipping(run: RunSpec) -> dict[str, Any]:
    return {} if run.train is None else {"gradient_clipping": run.train.clip_norm}


def _read_optimizer(table: Mapping[str, object], reading: Reading) -> None:
    """Read the optimizer and its parameters; those that it has depend on its type."""
    optimizer = subtable(table, "optimizer")
    if not optimizer:
        return
    name, settings = plain_text(optimizer.get("type", "")), subtable(optimizer, "params")
    kinds = {theirs.lower(): ours for ours, (theirs, _) in reversed(OPTIMIZERS.items())}
    kind = kinds.get(name.lower())
    if kind is None:
        hint = "; set job.optimizer, else it is adamw."
        reading.record(Outcome("unknown", f"optimizer {name[:40]}", why=hint))
        return
    if kind == "adam" and boolean(settings, "adam_w_mode", otherwise=True):
        kind = "adamw"
        reading.remark("DeepSpeed's Adam is AdamW unless adam_w_mode is false.")
    momentum = finite_number(settings, "momentum")
    if kind == "sgd" and momentum:
        kind = "momentum"
        reading.train["momentum"] = momentum
    reading.given("optimizer", {"job.optimizer": kind}, name, naming="pair")
    _lose_automatic("optimizer.params", settings, reading)
    more = (*_OPTIMIZER_PARAMS, *(("adam_w_mode",) if kind in ("adam", "adamw") else ()))
    list_unknown(reading, settings, more, "optimizer.params.")
    set_optimizer(
        reading,
        lambda key: finite_number(settings, key, "optimizer.params."),
        settings.get("betas"),
    )


def _lose_automatic(where: str, settings: Mapping[str, object], reading: Reading) -> None:
    """Report parameters that are "auto"."""
    for key, value in settings.items():
        if value == "auto":
            reading.lose(f"{where}.{key}", AUTO)


def _write_optimizer(run: RunSpec) -> dict[str, Any]:
    """The optimizer; AdamW if DeepSpeed does not have it."""
    kind, train = run.job.optimizer, run.train
    if train is None:
        return {}
    name, more = OPTIMIZERS.get(kind, OPTIMIZERS["adamw"])
    settings: dict[str, object] = {"lr": train.learning_rate, "weight_decay": train.weight_decay}
    if kind in ("sgd", "momentum"):
        settings["momentum"] = train.momentum if kind == "momentum" else 0.0
    else:
        settings["betas"] = [train.beta1, train.beta2]
    if kind not in ("sgd", "momentum", "lion"):
        settings["eps"] = train.epsilon
    return {"optimizer": {"type": name, "params": {**settings, **more}}}


def _read_scheduler(table: Mapping[str, object], reading: Reading) -> None:
    """Read the schedule of the learning rate, and the steps of the run, which it counts."""
    scheduler = subtable(table, "scheduler")
    if not scheduler:
        return
    name, settings = plain_text(scheduler.get("type", "")), subtable(scheduler, "params")
    if name not in _SCHEDULES:
        hint = "; set train.schedule and warmup_steps."
        reading.record(Outcome("unknown", f"scheduler {name[:40]}", why=hint))
        return
    where = "scheduler.params"
    _lose_automatic(where, settings, reading)
    list_unknown(reading, settings, _SCHEDULER_PARAMS, f"{where}.")
    steps = positive_integer(settings, "total_num_steps", f"{where}.")
    warmup = positive_integer(settings, "warmup_num_steps", f"{where}.")
    if steps is not None:
        reading.train["steps"] = steps
    if warmup is not None:
        set_warmup(reading, warmup)
    linear = _SCHEDULES[name] == "linear"
    final = 0.0 if linear else finite_number(settings, "cos_min_ratio", f"{where}.")
    if final is not None:
        reading.train["final_learning_rate"] = final
    if str(settings.get("warmup_type", "log")) != "linear":
        reading.lose("scheduler", "Shardwise warms up linearly, not logarithmically")
    reading.given("scheduler", {"train.schedule": _SCHEDULES[name]}, name, naming="pair")


def _write_scheduler(run: RunSpec) -> dict[str, Any]:
    """The schedule of the learning rate."""
    train = run.train
    if train is None:
        return {}
    # DeepSpeed warms up over 2 steps at least.
    warmup = {"warmup_num_steps": max(1, train.warmup_steps), "warmup_type": "linear"}
    steps = {"total_num_steps": train.steps}
    rates = {"warmup_min_lr": 0.0, "warmup_max_lr": train.learning_rate}
    name, params = {
        "constant": ("WarmupLR", rates),
        "linear": ("WarmupDecayLR", {**steps, **rates}),
        "cosine": (
            "WarmupCosineLR",
            {**steps, "cos_min_ratio": train.final_learning_rate, "warmup_min_ratio": 0.0},
        ),
    }[train.schedule]
    return {"scheduler": {"type": name, "params": {**params, **warmup}}}


def _allows_untested(run: RunSpec) -> Any:
    """True for optimizers that DeepSpeed has not tested with sharding, and refuses without it."""
    untested = run.train is not None and run.job.optimizer in ("sgd", "momentum")
    return True if untested else ABSENT


BATCH = Code(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    "two of them, and the number of devices, give the third",
    _read_batch,
    _write_batch,
)
CLIPPING = Code(
    ("gradient_clipping",),
    "its default counts only with an optimizer in the file",
    _read_clipping,
    _write_clipping,
    {"gradient_clipping": 1.0},
)
TRAIN: Table = (
    CLIPPING,
    Code(
        ("optimizer.type", "optimizer.params"),
        "the type decides which parameters there are",
        _read_optimizer,
        _write_optimizer,
    ),
    Code(
        ("scheduler.type", "scheduler.params"),
        "the type decides which parameters there are",
        _read_scheduler,
        _write_scheduler,
    ),
    Row(
        "steps_per_print",
        write=lambda run: ABSENT if run.train is None else run.train.log_every,
    ),
    Row("zero_allow_untested_optimizer", write=_allows_untested),
)
