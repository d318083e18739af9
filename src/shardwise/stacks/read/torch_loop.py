"""Read the training loop of a script: batch, optimizer, clipping and accumulation."""

from __future__ import annotations

import ast

from shardwise.spec.record import SpecError
from shardwise.stacks.outcomes import ABSENT, repr_text
from shardwise.stacks.read.imported import Reading, set_optimizer
from shardwise.stacks.read.source import Call, Script, unused_reason
from shardwise.stacks.read.torch_values import is_number

# Usual variable names for the micro-batches per step, the sequence length and the micro-batch.
_ACCUMULATE = ("gradient_accumulation_steps", "grad_accumulation_steps", "accumulation_steps",
               "grad_accum_steps", "accumulate_steps", "accum_steps", "grad_accum",
               "accumulate")  # fmt: skip
_SEQ_LEN = ("seq_len", "seq_length", "sequence_length", "block_size", "max_seq_len",
            "max_seq_length", "context_length")  # fmt: skip
_MICRO_BATCH = ("micro_batch", "micro_batch_size")
# In scripts that `shardwise export` wrote.
_LOSS_CHUNKS = ("loss_chunks",)
_OPTIMIZERS = {"AdamW": "adamw", "Adam": "adam", "SGD": "sgd", "Lion": "lion"}
# torch's defaults for arguments that the script does not pass.
_DEFAULTS = {
    "AdamW": {"learning_rate": 1e-3, "weight_decay": 1e-2, "beta1": 0.9, "beta2": 0.999},
    "Adam": {"learning_rate": 1e-3, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.999},
    "SGD": {"learning_rate": 1e-3, "weight_decay": 0.0},
}
# Optimizer arguments and the fields of [train] that they set.
_FIELDS = {
    "lr": ("learning_rate",),
    "weight_decay": ("weight_decay",),
    "eps": ("epsilon",),
    "betas": ("beta1", "beta2"),
}
_SCHEDULES = ("LambdaLR", "CosineAnnealingLR", "OneCycleLR", "LinearLR", "SequentialLR", "StepLR",
              "get_scheduler", "get_cosine_schedule_with_warmup",
              "get_linear_schedule_with_warmup")  # fmt: skip
_RECOMPUTE = ("apply_activation_checkpointing", "checkpoint_wrapper",
              "gradient_checkpointing_enable")  # fmt: skip


def read_loop(script: Script, reading: Reading) -> None:
    """Read the loop around the model.

    That is batch, optimizer, clipping, recompute, compile, chunked loss and sequence length.
    """
    _micro_batch(script, reading)
    for call in script.calls(*_OPTIMIZERS):
        _optimizer(call, reading)
        if script.uses(*_SCHEDULES) or _sets_rates(script):
            reading.warn("The schedule of the learning rate is the script's; set train.schedule.")
        else:
            reading.train["schedule"] = "constant"
        reading.train["clip_norm"] = 0.0
        break
    for call in script.calls("clip_grad_norm_", "clip_grads_with_norm_", "Trainer"):
        if call.name != "Trainer" or call.get("gradient_clip_val") is not None:
            _clipping(call, reading)
            break
    by_hand = any(c.origin.startswith("torch.utils.") for c in script.calls("checkpoint"))
    if by_hand or script.uses(*_RECOMPUTE):
        full = {"recompute": "full"}
        reading.given("Activation checkpointing", full, why=": every block")
    if any(call.origin in ("torch.compile", "") for call in script.calls("compile")):
        reading.given("torch.compile", {"compile": True}, why=", block by block")
    found = _integer_variable(script, _LOSS_CHUNKS)
    if found and 2 <= found[1] <= 2**20:
        reading.given(found[0], {"loss": "chunked"}, found[1], naming="assignment")
        reading.strategy["loss_chunks"] = found[1]
    found = _integer_variable(script, _SEQ_LEN)
    if found:
        reading.job["seq_len"] = found[1]
        reading.given(found[0], {"job.seq_len": ABSENT}, found[1], naming="assignment")


def _micro_batch(script: Script, reading: Reading) -> None:
    """Read the micro-batch from the DataLoader's `batch_size`, or from a variable."""
    for call in script.calls("DataLoader"):
        size = call.get("batch_size", 1)
        whole_batches = "batch_size" in call.keywords and size is None
        if call.more or call.get("batch_sampler") is not None or whole_batches:
            break
        if size is None:
            one = {"micro_batch": 1}
            reading.remark(
                "DataLoader's batch_size is absent, so its default is micro_batch = 1.", one
            )
        elif isinstance(size, (bool, float, str)) or (isinstance(size, int) and size < 1):
            raise SpecError(
                f"batch_size: must be a whole number of at least 1, not {repr_text(size)}; correct "
                "it in the script's DataLoader"
            )
        elif isinstance(size, int) and size <= 2**20:
            reading.given(f"DataLoader(batch_size={size})", {"micro_batch": size})
        else:
            reading.lose("micro_batch", f"batch_size {unused_reason(size)}")
        return
    found = _integer_variable(script, _MICRO_BATCH)
    if found and 1 <= found[1] <= 2**20:
        reading.given(found[0], {"micro_batch": found[1]}, found[1], naming="assignment")
        return
    reading.lose("micro_batch", "no DataLoader with a batch_size is in this script")


def _clipping(call: Call, reading: Reading) -> None:
    """Read the gradient clipping norm.

    It is the second argument of torch's function, the first of a model's method, and
    `gradient_clip_val` of Lightning's Trainer.
    """
    function = call.origin.startswith("torch.") or (
        len(call.args) > 1 and not is_number(call.args[0])
    )
    norm = call.get("max_norm", 1 if function else 0)
    if call.name == "Trainer":
        norm = call.get("gradient_clip_val")
    if is_number(norm):
        key = "gradient_clip_val" if call.name == "Trainer" else call.name
        # As the script writes the number.
        clipped = f"{key} becomes train.clip_norm = {norm}."
        reading.remark(clipped, {"train.clip_norm": float(norm)})
    else:
        reading.train.pop("clip_norm", None)
        reading.lose("clip_norm", f"{unused_reason(norm)}; set train.clip_norm")


def _optimizer(call: Call, reading: Reading) -> None:
    """Read the optimizer and its arguments; absent arguments get torch's defaults."""
    kind = _OPTIMIZERS[call.name]
    momentum = call.get("momentum")
    if kind == "sgd" and isinstance(momentum, (int, float)) and momentum > 0:
        kind = "momentum"
        reading.train["momentum"] = float(momentum)
    defaults = {} if call.more else _DEFAULTS.get(call.name, {})
    reading.train |= defaults
    if call.more:
        reading.warn(f"Some settings of {call.name} are made when the script runs.")

    def number(name: str) -> float | None:
        """The numeric argument `name`; None if it is absent or known only at run time."""
        value = call.get(name, 1 if name == "lr" else None)
        if is_number(value):
            return float(value)
        if value is not None:
            reading.train.pop(_FIELDS[name][0], None)
            reading.lose(name, f"{unused_reason(value)}; set train.{_FIELDS[name][0]}")
        return None

    betas = call.get("betas")
    known = isinstance(betas, tuple) and all(is_number(beta) for beta in betas)
    if betas is not None and not known:
        for field in _FIELDS["betas"]:
            reading.train.pop(field, None)
        reading.lose("betas", f"{unused_reason(betas)}; set train.beta1 and train.beta2")
    set_optimizer(reading, number, betas if known else None)
    grouped = _decay_of_groups(call, reading)
    absent = [
        name
        for name, fields in _FIELDS.items()
        if fields[0] in defaults
        and call.get(name, 1 if name == "lr" else None) is None
        and not (grouped and name == "weight_decay")
    ]
    if absent:
        reading.explain(
            f"{' and '.join(absent)} of {call.name}",
            f"absent, so torch's default{'s hold' if len(absent) > 1 else ' holds'}",
        )
    reading.given(call.name, {"job.optimizer": kind})


def _sets_rates(script: Script) -> bool:
    """Whether the script assigns learning rates itself: `group["lr"] = ...`."""
    return any(
        isinstance(target, ast.Subscript)
        and isinstance(target.slice, ast.Constant)
        and target.slice.value == "lr"
        for node in ast.walk(script.tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
    )


def _decay_of_groups(call: Call, reading: Reading) -> bool:
    """Whether parameter groups have weight decays of their own.

    Sets `train.weight_decay` if all nonzero decays are equal: Shardwise decays matrices only.
    """
    groups = call.get("params", 0)
    if not isinstance(groups, tuple):
        return False
    given = [g["weight_decay"] for g in groups if isinstance(g, dict) and "weight_decay" in g]
    if not given:
        return False
    decays = {value for value in given if is_number(value) and value != 0}
    if len(decays) == 1 and all(map(is_number, given)):
        reading.train["weight_decay"] = float(decays.pop())
        reading.given("The weight_decay of a group", {"train.weight_decay": ABSENT})
    elif any(given):
        reading.train.pop("weight_decay", None)
        reading.lose("weight_decay", "groups of parameters have their own; set train.weight_decay")
    return True


def read_accumulation(script: Script, reading: Reading) -> None:
    """Read the micro-batches per step, and in which of them gradients are reduced."""
    found = _integer_variable(script, _ACCUMULATE)
    if found and found[1] > 0:
        reading.given(found[0], {"accumulate": found[1]}, found[1], naming="assignment")
    else:
        reading.lose("accumulate", "no number of micro-batches of a step is in this script")
    kind = reading.strategy["kind"]
    if script.uses("set_requires_all_reduce"):
        reading.given("set_requires_all_reduce", {"grad_sync": "local"})
    elif script.uses("set_requires_gradient_sync", "no_sync"):
        if kind == "ddp" and _only_backward_inside(script):
            reading.strategy["grad_sync"] = "every"
            reading.warn(
                "no_sync around the backward alone stops no reduction of DDP, which needs the "
                "forward inside too; read as what it does, grad_sync = every."
            )
            return
        last = ": gradients stay whole until the last micro-batch"
        reading.given("no_sync", {"grad_sync": "last"}, why=last)
    elif found and found[1] > 1:
        reading.remark(
            "Without no_sync every micro-batch reduces its gradients: grad_sync = every.",
            {"grad_sync": "every"},
        )
        if kind == "zero2":
            reading.strategy["reshard_after_backward"] = True
    if script.uses("set_reshard_after_backward"):
        reading.given("set_reshard_after_backward", {"reshard_after_backward": False})


def _integer_variable(script: Script, names: tuple[str, ...]) -> tuple[str, int] | None:
    """(name, value) of the first name, also in capitals, that holds one integer; or None."""
    return script.number(*names, *(name.upper() for name in names))


def _only_backward_inside(script: Script) -> bool:
    """Whether every `with model.no_sync()` holds a backward and never calls the model."""
    blocks = [
        (item.context_expr.func.value, node)
        for node in ast.walk(script.tree)
        if isinstance(node, ast.With)
        for item in node.items
        if isinstance(item.context_expr, ast.Call)
        and isinstance(item.context_expr.func, ast.Attribute)
        and item.context_expr.func.attr == "no_sync"
    ]
    return bool(blocks) and not any(
        isinstance(inner, ast.Call) and ast.dump(inner.func) == ast.dump(model)
        for model, node in blocks
        for inner in ast.walk(node)
    )
