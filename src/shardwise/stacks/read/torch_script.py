"""Read a training script that uses FSDP1, FSDP2 or DDP directly, and its training loop."""

from __future__ import annotations

import ast

from shardwise.spec.record import SpecError
from shardwise.stacks.outcomes import UNSAID, quoted
from shardwise.stacks.read import fsdp1, torchtitan, trainer_script
from shardwise.stacks.read.imported import Imported, Reading, list_unknown, set_optimizer
from shardwise.stacks.read.model_name import set_model_of_script
from shardwise.stacks.read.objective import objective_of_script
from shardwise.stacks.read.source import DIFFERS, Call, Script, Symbol, Unknown, shown, why_not
from shardwise.stacks.read.torch_axes import read_axes
from shardwise.stacks.read.torch_values import DTYPES, read_mesh, read_mixed_precision

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
_WITH_DDP = "a script with DDP"
_SCHEDULES = ("LambdaLR", "CosineAnnealingLR", "OneCycleLR", "LinearLR", "SequentialLR", "StepLR",
              "get_scheduler", "get_cosine_schedule_with_warmup",
              "get_linear_schedule_with_warmup")  # fmt: skip
_LIGHTNING = (
    "the strategy of Lightning's Trainer is not read: write it into a run.toml, such as "
    'strategy = "ddp" for DDPStrategy'
)
# Known arguments of fully_shard and DDP: those that are read, and those that no plan depends on.
_FULLY_SHARD = ("module", "mesh", "reshard_after_forward", "mp_policy", "offload_policy",
                "shard_placement_fn", "ignored_params", "dp_mesh_dims")  # fmt: skip
_DDP = ("module", "device_ids", "output_device", "dim", "broadcast_buffers", "init_sync",
        "process_group", "bucket_cap_mb", "find_unused_parameters", "check_reduction",
        "gradient_as_bucket_view", "static_graph", "delay_all_reduce_named_params",
        "param_to_hook_all_reduce", "mixed_precision", "device_mesh",
        "skip_all_reduce_unused_params", "bucket_cap_mb_list", "batched_grad_copy",
        "forward_sync_buffers")  # fmt: skip
_RECOMPUTE = ("apply_activation_checkpointing", "checkpoint_wrapper",
              "gradient_checkpointing_enable")  # fmt: skip


def read(text: str) -> Imported:
    """The settings of a script, read from its text without running it."""
    script = Script(text)
    found = _read(script)
    # A script that creates its configuration is read as what that is for.
    return found._replace(objective=found.objective or objective_of_script(script))


def _read(script: Script) -> Imported:
    """The settings of a script: of torchtitan, FSDP1, FSDP2, DDP or the Trainer, in this order."""
    if torchtitan.is_torchtitan(script):
        return torchtitan.read(script)
    old = list(script.calls("FullyShardedDataParallel"))
    old += [call for call in script.calls("enable_wrap") if _wraps_with_fsdp(call)]
    new = list(script.calls("fully_shard"))
    replicated = list(script.calls("DistributedDataParallel"))
    if old:
        reading = Reading("a script with FSDP1")
        fsdp1.read_wrapped(old, reading)
    elif new:
        reading = Reading("a script with FSDP2")
        _fully_shard(script, new, reading)
    elif replicated:
        reading = Reading(_WITH_DDP)
        _ddp(replicated, reading)
    elif trainer_script.has_arguments(script):
        return trainer_script.read(script)
    else:
        raise SpecError(_nothing_found(script))
    others = [name for name, calls in (("fully_shard", new), ("DDP", replicated)) if calls]
    if old and others:
        reading.warn(f"The script also uses {' and '.join(others)}; it was read as FSDP1.")
    _precision(script, reading)
    _loop(script, reading)
    _accumulation(script, reading)
    set_model_of_script(script, reading)
    return reading.done()


def _wraps_with_fsdp(call: Call) -> bool:
    wrapper = call.get("wrapper_cls")
    return isinstance(wrapper, Symbol) and wrapper.last == "FullyShardedDataParallel"


def _nothing_found(script: Script) -> str:
    """The error for a script that shards nothing, with a hint what to import instead."""
    for name, module, instead in (
        ("Accelerator", "accelerate", "import the YAML that accelerate is configured with"),
        (
            "Trainer",
            "transformers",
            "import the file that creates TrainingArguments, or its JSON or YAML",
        ),
        ("initialize", "deepspeed", "import the JSON that DeepSpeed is configured with"),
        ("Trainer", "lightning", _LIGHTNING),
        ("Trainer", "pytorch_lightning", _LIGHTNING),
    ):
        if any(call.origin.partition(".")[0] == module for call in script.calls(name)):
            return (
                f"import: the script calls {name} of {module} and shards nothing itself; {instead}"
            )
    return (
        "import: the script calls none of FullyShardedDataParallel, fully_shard and "
        "DistributedDataParallel; give the file in which the model is wrapped, or, where one "
        'device is all that it uses, write strategy = "single" into a run.toml'
    )


def _fully_shard(script: Script, calls: list[Call], reading: Reading) -> None:
    """Read the calls of `fully_shard`: kind, dtypes, mesh, tensor and context degrees, offload."""
    # The root is sharded last, and often keeps its parameters whatever the blocks do.
    blocks = calls[:-1] or calls
    values = {shown(call.get("reshard_after_forward")) for call in blocks}
    value = blocks[0].get("reshard_after_forward")
    if len(values) > 1:
        value = DIFFERS
    if any(call.more for call in calls):
        reading.warn(
            "Some settings of fully_shard come from a dictionary made when the script runs."
        )
        value = Unknown("what that dictionary holds") if value is None else value
    _reshards(value, reading)
    if len(calls) == 1:
        reading.remark(
            "The script calls fully_shard once: in a loop over blocks, or on the root alone."
        )
    first = calls[0]
    _others_of_fully_shard(calls, reading)
    policy = first.get("mp_policy")
    if policy is None and first.more:
        policy = Unknown("what that dictionary holds")
    read_mixed_precision(policy, reading)
    if not read_axes(script, reading):
        read_mesh(first.get("mesh"), reading)
    offload = first.get("offload_policy")
    if isinstance(offload, Call) and offload.name in ("CPUOffloadPolicy", "OffloadPolicy"):
        reading.given(offload.name, {"offload": offload.name == "CPUOffloadPolicy"})
    elif offload is not None:
        reading.lose("offload_policy", why_not(offload))
    if script.uses("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
        reading.warn(
            "The script chooses what to prefetch; set strategy.prefetch, which counts units."
        )


def _reshards(value: object, reading: Reading) -> None:
    """Set the kind, ZeRO-2 or ZeRO-3, from the value of `reshard_after_forward`."""
    key = "reshard_after_forward"
    kind = {"kind": "zero2" if value is False else "zero3"}
    if value is None:
        reading.default(key, kind, True)
    elif isinstance(value, (bool, int)):
        reading.given(key, kind, value, naming="pair")
        if not isinstance(value, bool):
            reading.strategy[key] = value
    else:
        reading.strategy |= kind
        reading.lose(key, f"{why_not(value)}; read as true")


def _others_of_fully_shard(calls: list[Call], reading: Reading) -> None:
    """Report the other arguments of `fully_shard` that have no counterpart."""
    for call in calls:
        list_unknown(reading, call.keywords, _FULLY_SHARD, "fully_shard.")
        for name, why in (
            ("ignored_params", "Shardwise shards every parameter"),
            ("shard_placement_fn", "Shardwise shards parameters along their first dimension"),
        ):
            if call.get(name) is not None:
                reading.lose(name, why)


def _ddp(calls: list[Call], reading: Reading) -> None:
    """Read the first call of DistributedDataParallel, and list unknown arguments of all calls."""
    reading.given("DistributedDataParallel", {"kind": "ddp"})
    for call in calls:
        list_unknown(reading, call.keywords, _DDP, "DistributedDataParallel.")
    for name in ("mixed_precision", "process_group", "device_mesh", "bucket_cap_mb_list"):
        if calls[0].get(name) is not None:
            reading.lose(name, "Shardwise has no counterpart")
    if calls[0].more:
        reading.warn("Some settings of DDP come from a dictionary made when the script runs.")
    bucket = calls[0].get("bucket_cap_mb")
    if bucket is not None and not _is_number(bucket):
        reading.lose("bucket_cap_mb", why_not(bucket))
    elif bucket is not None:
        reading.given("bucket_cap_mb", {"ddp_bucket_mib": bucket})
    if calls[0].get("gradient_as_bucket_view") is not True:
        reading.remark(
            "The script's DDP keeps gradients beside buckets; Shardwise keeps them in the buckets."
        )
    if calls[0].get("find_unused_parameters") is True:
        reading.lose(
            "find_unused_parameters", "every parameter must receive a gradient in Shardwise"
        )
    if calls[0].get("static_graph") is True:
        reading.lose("static_graph", "Shardwise does not set it")


def _precision(script: Script, reading: Reading) -> None:
    """Read autocast, and the dtype that the model is loaded in."""
    sharded = reading.strategy.get("kind") != "ddp"
    if reading.what != _WITH_DDP and "param_dtype" not in reading.strategy:
        # The script passes a mixed-precision policy that is known only at run time.
        return
    low, known = _autocast(script, reading)
    if not known:
        return
    if low and reading.strategy.get("param_dtype", "fp32") == "fp32":
        reading.strategy |= {"param_dtype": low, "reduce_dtype": "fp32"}
        if sharded:
            reading.lose(
                "autocast",
                f"the script gathers parameters in fp32 and computes in {low}; Shardwise gathers "
                f"them in {low}, half the bytes",
            )
        else:
            reading.given("autocast", {"param_dtype": low})
    elif not sharded:
        reading.strategy.setdefault("param_dtype", "fp32")
    for call in script.calls("from_pretrained", "from_config"):
        kept = DTYPES.get(shown(call.get("dtype") or call.get("torch_dtype")))
        if kept in ("bf16", "fp16"):
            reading.strategy["master_dtype"] = kept
            if reading.strategy.get("param_dtype", "fp32") == "fp32" and not low:
                reading.strategy |= {"param_dtype": kept, "reduce_dtype": kept}
            loaded = f"The model is loaded in {kept}: master_dtype = {kept}."
            reading.remark(loaded, {"master_dtype": kept})
            break


def _autocast(script: Script, reading: Reading) -> tuple[str | None, bool]:
    """The dtype of the first enabled autocast, or None; and whether that answer is certain.

    It is uncertain if `enabled` or the dtype is known only at run time, which is reported.
    """
    for call in script.calls("autocast"):
        given, enabled = call.get("dtype", 1), call.get("enabled")
        if enabled is False:
            continue
        if enabled not in (None, True):
            reading.lose("autocast(enabled)", f"{why_not(enabled)}; set param_dtype")
            return None, False
        if given is None:
            device = call.get("device_type", 0)
            low = "bf16" if device == "cpu" else "fp16"
            where = "CPUs" if device == "cpu" else "GPUs"
            absent = f"autocast's dtype is absent, so its default on {where} holds, {low}."
            reading.remark(absent)
            return low, True
        if shown(given) not in DTYPES:
            reading.lose("autocast", f"{why_not(given)}; set param_dtype")
            return None, False
        return DTYPES[shown(given)], True
    return None, True


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _loop(script: Script, reading: Reading) -> None:
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
    found = _number(script, _LOSS_CHUNKS)
    if found and 2 <= found[1] <= 2**20:
        reading.given(found[0], {"loss": "chunked"}, found[1], naming="assignment")
        reading.strategy["loss_chunks"] = found[1]
    found = _number(script, _SEQ_LEN)
    if found:
        reading.job["seq_len"] = found[1]
        reading.given(found[0], {"job.seq_len": UNSAID}, found[1], naming="assignment")


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
                f"batch_size: must be a whole number of at least 1, not {quoted(size)}; correct it "
                "in the script's DataLoader"
            )
        elif isinstance(size, int) and size <= 2**20:
            reading.given(f"DataLoader(batch_size={size})", {"micro_batch": size})
        else:
            reading.lose("micro_batch", f"batch_size {why_not(size)}")
        return
    found = _number(script, _MICRO_BATCH)
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
        len(call.args) > 1 and not _is_number(call.args[0])
    )
    norm = call.get("max_norm", 1 if function else 0)
    if call.name == "Trainer":
        norm = call.get("gradient_clip_val")
    if _is_number(norm):
        key = "gradient_clip_val" if call.name == "Trainer" else call.name
        # As the script writes the number.
        clipped = f"{key} becomes train.clip_norm = {norm}."
        reading.remark(clipped, {"train.clip_norm": float(norm)})
    else:
        reading.train.pop("clip_norm", None)
        reading.lose("clip_norm", f"{why_not(norm)}; set train.clip_norm")


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
        if _is_number(value):
            return float(value)
        if value is not None:
            reading.train.pop(_FIELDS[name][0], None)
            reading.lose(name, f"{why_not(value)}; set train.{_FIELDS[name][0]}")
        return None

    betas = call.get("betas")
    known = isinstance(betas, tuple) and all(_is_number(beta) for beta in betas)
    if betas is not None and not known:
        for field in _FIELDS["betas"]:
            reading.train.pop(field, None)
        reading.lose("betas", f"{why_not(betas)}; set train.beta1 and train.beta2")
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
        reading.about(
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
    decays = {value for value in given if _is_number(value) and value != 0}
    if len(decays) == 1 and all(map(_is_number, given)):
        reading.train["weight_decay"] = float(decays.pop())
        reading.given("The weight_decay of a group", {"train.weight_decay": UNSAID})
    elif any(given):
        reading.train.pop("weight_decay", None)
        reading.lose("weight_decay", "groups of parameters have their own; set train.weight_decay")
    return True


def _accumulation(script: Script, reading: Reading) -> None:
    """Read the micro-batches per step, and in which of them gradients are reduced."""
    found = _number(script, _ACCUMULATE)
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


def _number(script: Script, names: tuple[str, ...]) -> tuple[str, int] | None:
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
