"""Tables of rows for the settings of TrainingArguments (transformers) and of axolotl.

The Trainer, TRL and LLaMA-Factory use the keys of TrainingArguments. Defaults are those of
transformers 5.22 and axolotl 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.spec.run import RunSpec
from shardwise.spec.train import TrainSettings
from shardwise.stacks.fused_loss import read_liger, read_plugins, write_liger, write_plugins
from shardwise.stacks.outcomes import ABSENT, repr_text
from shardwise.stacks.read.imported import (
    Reading,
    finite_number,
    list_unknown,
    positive_integer,
    set_warmup,
    subtable,
)
from shardwise.stacks.read.optimizers import set_named_optimizer
from shardwise.stacks.table import (
    COUNT,
    NUMBER,
    SEED,
    STEPS,
    Code,
    Row,
    Table,
    boolean_form,
    with_changed_rows,
)

# transformers' optimizers; its 8-bit and 4-bit states are torchao's, which can be sharded.
OPTIMIZERS = {
    "adamw": "adamw_torch",
    "adamw-8bit": "adamw_torch_8bit",
    "adamw-4bit": "adamw_torch_4bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}
# axolotl adds torchao's AdamW with fp8 states, and Muon.
AXOLOTL_OPTIMIZERS = {**OPTIMIZERS, "adamw-fp8": "ao_adamw_fp8", "muon": "muon"}
_NO_COUNTERPART = "has no counterpart; set train.schedule, which is cosine, linear or constant"


def _read_warmup(table: Mapping[str, object], key: str, reading: Reading) -> None:
    """Read `warmup_steps`: a number of steps. A value between 0 and 1 is reported as lost."""
    share = finite_number(table, key) or 0.0
    if 0 < share < 1:
        reading.lose(key, "a share of all steps; set train.warmup_steps")
    elif share > 0:
        set_warmup(reading, positive_integer(table, key) or 0)


def _read_axolotl_warmup(table: Mapping[str, object], reading: Reading) -> None:
    """Read axolotl's warm-up; the default is 3% of the run's steps, at most 100, never 1."""
    key, steps = "warmup_steps", reading.train.get("steps")
    if table.get(key) is not None:
        _read_warmup(table, key, reading)
    elif table.get("warmup_ratio") is None and isinstance(steps, int):
        count = min(steps * 3 // 100, 100)
        reading.default(key, {"train.warmup_steps": 2 if count == 1 else count})


def _read_optimizer(table: Mapping[str, object], key: str, reading: Reading) -> None:
    """Set `job.optimizer` from the name under `key`."""
    set_named_optimizer(reading, key, table[key])


def _train_field(field: str) -> Any:
    """A function from a run to its `[train]` field; ABSENT if the run has no such section."""
    return lambda run: ABSENT if run.train is None else getattr(run.train, field)


def _bucket(run: RunSpec) -> Any:
    """DDP bucket size in MiB; ABSENT without DDP or if it is not a whole number of MiB."""
    size = run.strategy.ddp_bucket_mib
    fits = run.strategy.kind == "ddp" and size is not None and size == int(size)
    return int(size) if fits and size is not None else ABSENT


def _read_schedule(table: Mapping[str, object], reading: Reading) -> None:
    """Read `lr_scheduler_type` into `train.schedule` and `train.final_learning_rate`.

    A cosine decays to 0 or to `lr_scheduler_kwargs.min_lr_rate` (a share of the peak), a linear
    schedule always to 0.
    """
    key = "lr_scheduler_type"
    if key in reading.undecided:
        return
    name = table.get(key)
    settings = subtable(table, "lr_scheduler_kwargs")
    final = finite_number(settings, "min_lr_rate", "lr_scheduler_kwargs.")
    if name is None:
        _absent_schedule(key, "linear", reading)
        return
    cosines = ("cosine",) if final is None else ("cosine", "cosine_with_min_lr")
    if _set_schedule(key, name, final, reading, cosines):
        list_unknown(reading, settings, ("min_lr_rate",), "lr_scheduler_kwargs.")


def _read_axolotl_schedule(table: Mapping[str, object], reading: Reading) -> None:
    """Read axolotl's `lr_scheduler` and `cosine_min_lr_ratio`.

    They set `train.schedule` and `train.final_learning_rate`.
    """
    key = "lr_scheduler"
    name, final = table.get(key), finite_number(table, "cosine_min_lr_ratio")
    if name is None and final is None:
        _absent_schedule(key, "cosine", reading)
    else:
        cosines = ("cosine", "cosine_with_min_lr")
        _set_schedule(key, name or "cosine", final, reading, cosines)


def _absent_schedule(key: str, name: str, reading: Reading) -> None:
    """Record the stack's default schedule, unless another part of the file has set one."""
    if not reading.has("train.schedule"):
        reading.default(key, {"train.schedule": name})
        reading.set("train.final_learning_rate", 0.0)


def _set_schedule(
    key: str, name: object, final: float | None, reading: Reading, cosines: tuple[object, ...]
) -> bool:
    """Set the schedule called `name` in the file; return whether Shardwise has it.

    Args:
        key: The key of the file, for the message.
        name: The schedule as the file names it.
        final: The last learning rate as a share of the peak; None is 0.
        reading: Where the fields are set, or the loss is recorded.
        cosines: The names that mean a cosine.
    """
    if name in ("constant", "constant_with_warmup"):
        reading.train["schedule"] = "constant"
    elif name in cosines:
        reading.train |= {"schedule": "cosine", "final_learning_rate": final or 0.0}
    elif name == "linear":
        reading.train |= {"schedule": "linear", "final_learning_rate": 0.0}
    else:
        reading.lose(key, f"{repr_text(name)} {_NO_COUNTERPART}")
        return False
    reading.given(key, {"train.schedule": ABSENT}, name, naming="pair")
    return True


def _write_schedule(run: RunSpec) -> dict[str, Any]:
    """The keys of TrainingArguments for the learning rate schedule of a run."""
    train = run.train or TrainSettings()
    if train.schedule == "cosine":
        floor = {"min_lr_rate": train.final_learning_rate}
        return {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": floor}
    linear = train.schedule == "linear"
    return {"lr_scheduler_type": "linear" if linear else "constant_with_warmup"}


def _write_axolotl_schedule(run: RunSpec) -> dict[str, Any]:
    """The keys of axolotl for the learning rate schedule of a run."""
    train = run.train or TrainSettings()
    if train.schedule == "cosine":
        return {"lr_scheduler": "cosine", "cosine_min_lr_ratio": train.final_learning_rate}
    linear = train.schedule == "linear"
    return {"lr_scheduler": "linear" if linear else "constant_with_warmup"}


def _steps(run: RunSpec) -> Any:
    """The steps of a run; ABSENT if its epochs decide, or without `[train]`."""
    return ABSENT if run.train is None or run.train.epochs is not None else run.train.steps


def _read_epochs(table: Mapping[str, object], key: str, reading: Reading) -> None:
    """Set `train.epochs`, which other stacks count and Shardwise's trainer does not."""
    epochs = finite_number(table, key)
    if epochs is not None and epochs > 0:
        reading.lose(key, "set train.steps, which counts steps; exports keep train.epochs")
        reading.set("train.epochs", epochs)


def _by_epochs(reading: Reading) -> bool:
    """Whether epochs decide the length of a run: no steps are set, nor known only at run time."""
    return not reading.has("train.steps") and "max_steps" not in reading.undecided


def _epochs(key: str, default: float) -> Row:
    """The row for the epochs of a run without steps."""
    return Row(
        key,
        "train.epochs",
        default=default,
        when=_by_epochs,
        read=_read_epochs,
        write=lambda run: ABSENT if run.train is None else run.train.epochs or ABSENT,
    )


_MAX_STEPS = Row("max_steps", "train.steps", STEPS, more=None, write=_steps)
_WARMUP = Row("warmup_steps", read=_read_warmup, write=_train_field("warmup_steps"))
_RATE = Row("learning_rate", "train.learning_rate", NUMBER, default=5e-5, more=None)
_SHAPE: Table = (
    Row("weight_decay", "train.weight_decay", NUMBER, default=0.0, more=None),
    Row("max_grad_norm", "train.clip_norm", NUMBER, default=1.0, more=None),
)
_ADAM: Table = (
    Row("adam_beta1", "train.beta1", NUMBER, default=0.9, more=None),
    Row("adam_beta2", "train.beta2", NUMBER, default=0.999, more=None),
    Row("adam_epsilon", "train.epsilon", NUMBER, default=1e-8, more=None),
    Row("seed", "train.seed", SEED, default=42, more=None),
    Row("logging_steps", write=_train_field("log_every")),
)
_ACCUMULATE = Row("gradient_accumulation_steps", "accumulate", COUNT, default=1)
_COMPILE = Row("torch_compile", "compile", boolean_form(True), more=", block by block")
_DDP_BUCKET = Row(
    "ddp_bucket_cap_mb",
    "ddp_bucket_mib",
    NUMBER,
    write=_bucket,
    when=lambda reading: reading.strategy.get("kind") == "ddp",
)

BATCH: Table = (
    Row("per_device_train_batch_size", "micro_batch", COUNT, default=8),
    _ACCUMULATE,
)
METHODS: Table = (
    _COMPILE,
    _DDP_BUCKET,
    Code(
        ("use_liger_kernel", "liger_kernel_config"),
        "the second can leave head and loss out",
        read_liger,
        write_liger,
    ),
)
TRAIN: Table = (
    _MAX_STEPS,
    _epochs("num_train_epochs", 3.0),
    _WARMUP,
    _RATE,
    *_SHAPE,
    Row(
        "optim",
        default="adamw_torch_fused",
        ours="adamw",
        field="job.optimizer",
        read=_read_optimizer,
        write=lambda run: OPTIMIZERS.get(run.job.optimizer, "adamw_torch"),
    ),
    *_ADAM,
)
SCHEDULE = Code(
    ("lr_scheduler_type", "lr_scheduler_kwargs"),
    "the floor of a cosine is among the other's settings",
    _read_schedule,
    _write_schedule,
    {"lr_scheduler_type": "linear"},
)
# Rows in which SFTConfig of TRL 1.16 has another default.
SFT: dict[str, dict[str, Any]] = {"learning_rate": {"default": 2e-5}}
# Rows in which DPOConfig of TRL 1.16 has another default.
DPO: dict[str, dict[str, Any]] = {"learning_rate": {"default": 1e-6}}
# The same for TRL's other objectives: their default learning rates differ, so none is assumed.
OTHER_OBJECTIVES: dict[str, dict[str, Any]] = {"learning_rate": {"default": ABSENT}}

AXOLOTL_BATCH: Table = (
    Row("sequence_len", "job.seq_len", COUNT),
    Row("micro_batch_size", "micro_batch", COUNT, default=1),
    _ACCUMULATE,
)
AXOLOTL_METHODS: Table = (
    _DDP_BUCKET,
    _COMPILE,
    Code(
        ("plugins", "liger_fused_linear_cross_entropy", "cut_cross_entropy"),
        "a key counts only with its plugin",
        read_plugins,
        write_plugins,
    ),
)
AXOLOTL_TRAIN: Table = (
    _MAX_STEPS,
    _epochs("num_epochs", 1.0),
    Row(
        "optimizer",
        default="adamw_torch_fused",
        ours="adamw",
        field="job.optimizer",
        read=_read_optimizer,
        write=lambda run: AXOLOTL_OPTIMIZERS.get(run.job.optimizer, "adamw_torch"),
    ),
    # A file without a learning rate is refused.
    *with_changed_rows((_RATE,), {"learning_rate": {"default": ABSENT}}),
    Code(
        ("lr_scheduler", "cosine_min_lr_ratio"),
        "the second is the floor of a cosine only",
        _read_axolotl_schedule,
        _write_axolotl_schedule,
        {"lr_scheduler": "cosine"},
    ),
    Code(
        ("warmup_steps", "warmup_ratio"),
        "without either it is a share of all steps",
        _read_axolotl_warmup,
        _WARMUP.written,
    ),
    *_SHAPE,
    *_ADAM,
)
