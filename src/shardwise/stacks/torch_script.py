"""A training script that shards by itself: FSDP1, FSDP2 or DDP, and the loop around it."""

from __future__ import annotations

import ast

from shardwise.spec.record import SpecError
from shardwise.stacks import fsdp1
from shardwise.stacks.imported import Imported, Reading, set_optimizer
from shardwise.stacks.source import Call, Script, Symbol, Unknown, shown
from shardwise.stacks.torch_values import DTYPES, read_mesh, read_mixed_precision

# What people call the number of micro-batches of a step, and the length of a sequence.
_ACCUMULATE = ("gradient_accumulation_steps", "grad_accumulation_steps", "accumulation_steps",
               "grad_accum_steps", "accumulate_steps", "accum_steps", "grad_accum")  # fmt: skip
_SEQ_LEN = ("seq_len", "seq_length", "sequence_length", "block_size", "max_seq_len",
            "max_seq_length", "context_length")  # fmt: skip
_OPTIMIZERS = {"AdamW": "adamw", "Adam": "adam", "SGD": "sgd", "Lion": "lion"}
# What torch takes where the script says nothing.
_DEFAULTS = {
    "AdamW": {"learning_rate": 1e-3, "weight_decay": 1e-2, "beta1": 0.9, "beta2": 0.999},
    "Adam": {"learning_rate": 1e-3, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.999},
    "SGD": {"learning_rate": 1e-3, "weight_decay": 0.0},
}
_SCHEDULES = ("LambdaLR", "CosineAnnealingLR", "OneCycleLR", "LinearLR", "SequentialLR", "StepLR",
              "get_scheduler", "get_cosine_schedule_with_warmup",
              "get_linear_schedule_with_warmup")  # fmt: skip
_RECOMPUTE = ("apply_activation_checkpointing", "checkpoint_wrapper",
              "gradient_checkpointing_enable")  # fmt: skip


def read(text: str) -> Imported:
    """What a script settles about its strategy, without running it."""
    script = Script(text)
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
        reading = Reading("a script with DDP")
        _ddp(replicated, reading)
    else:
        raise SpecError(_nothing_found(script))
    others = [name for name, calls in (("fully_shard", new), ("DDP", replicated)) if calls]
    if old and others:
        reading.lose(f"The script also uses {' and '.join(others)}; it was read as FSDP1.")
    _precision(script, reading)
    _loop(script, reading)
    _accumulation(script, reading)
    return reading.done()


def _wraps_with_fsdp(call: Call) -> bool:
    wrapper = call.get("wrapper_cls")
    return isinstance(wrapper, Symbol) and wrapper.last == "FullyShardedDataParallel"


def _nothing_found(script: Script) -> str:
    for name, instead in (
        ("Accelerator", "the YAML that accelerate is configured with"),
        ("Trainer", "its TrainingArguments as JSON or YAML, or the accelerate YAML"),
        ("initialize", "the JSON that DeepSpeed is configured with"),
    ):
        if script.uses(name):
            return f"import: the script calls {name} and shards nothing itself; import {instead}"
    return (
        "import: the script calls none of FullyShardedDataParallel, fully_shard and "
        "DistributedDataParallel; give the file in which the model is wrapped"
    )


def _fully_shard(script: Script, calls: list[Call], reading: Reading) -> None:
    # The root is sharded last, and often keeps its parameters whatever the blocks do.
    blocks = calls[:-1] or calls
    values = {shown(call.get("reshard_after_forward")) for call in blocks}
    value = blocks[0].get("reshard_after_forward") if len(values) == 1 else Unknown("differs")
    if value is None or isinstance(value, (bool, int)):
        kept = value is False
        reading.strategy["kind"] = "zero2" if kept else "zero3"
        if isinstance(value, int) and not isinstance(value, bool):
            reading.strategy["reshard_after_forward"] = value
        said = "true, its default," if value is None else shown(value)
        reading.note(f"reshard_after_forward {said} becomes kind {reading.strategy['kind']}.")
    else:
        reading.strategy["kind"] = "zero3"
        reading.lose(
            f"reshard_after_forward: {shown(value)} is decided when the script runs; read as true."
        )
    if len(calls) == 1:
        reading.note("One call of fully_shard in a loop, or of the root alone, is all there is.")
    first = calls[0]
    read_mixed_precision(first.get("mp_policy"), reading)
    read_mesh(first.get("mesh"), reading)
    offload = first.get("offload_policy")
    if isinstance(offload, Call):
        reading.strategy["offload"] = offload.name == "CPUOffloadPolicy"
        reading.note(f"{offload.name} becomes offload = {shown(reading.strategy['offload'])}.")
    elif offload is not None:
        reading.lose(f"offload_policy: {shown(offload)} is decided when the script runs.")
    if script.uses("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
        reading.lose("The script chooses what is prefetched itself; here prefetch counts units.")


def _ddp(calls: list[Call], reading: Reading) -> None:
    reading.strategy["kind"] = "ddp"
    reading.note("DistributedDataParallel becomes kind ddp.")
    bucket = calls[0].get("bucket_cap_mb")
    if isinstance(bucket, (int, float)) and bucket > 0:
        reading.strategy["ddp_bucket_mib"] = bucket
        reading.note(f"bucket_cap_mb becomes ddp_bucket_mib = {bucket}.")
    if calls[0].get("gradient_as_bucket_view") is not True:
        reading.note("Gradients lie beside DDP's buckets there; here they live in them.")
    if calls[0].get("find_unused_parameters") is True:
        reading.lose("find_unused_parameters: every parameter must take part in a step here.")
    if calls[0].get("static_graph") is True:
        reading.lose("static_graph: not set here.")


def _precision(script: Script, reading: Reading) -> None:
    """Autocast, and a model that is loaded in a low precision."""
    low = None
    for call in script.calls("autocast"):
        given = call.get("dtype", 1)
        low = DTYPES.get(shown(given), None) if given is not None else "fp16"
        if low is None:
            reading.lose(f"autocast: {shown(given)} is decided when the script runs.")
        break
    sharded = reading.strategy.get("kind") != "ddp"
    if low and reading.strategy.get("param_dtype", "fp32") == "fp32":
        reading.strategy |= {"param_dtype": low, "reduce_dtype": "fp32"}
        if sharded:
            reading.lose(
                f"autocast computes in {low} on parameters gathered in fp32 there; here they are "
                f"gathered in {low}, half the bytes."
            )
        else:
            reading.note(f"autocast becomes param_dtype = {low}.")
    elif not sharded:
        reading.strategy.setdefault("param_dtype", "fp32")
    for call in script.calls("from_pretrained", "from_config"):
        kept = DTYPES.get(shown(call.get("dtype") or call.get("torch_dtype")))
        if kept in ("bf16", "fp16"):
            reading.strategy |= {"master_dtype": kept}
            if reading.strategy.get("param_dtype", "fp32") == "fp32" and not low:
                reading.strategy |= {"param_dtype": kept, "reduce_dtype": kept}
            reading.note(f"The model is loaded in {kept}: master_dtype = {kept}.")
            break


def _loop(script: Script, reading: Reading) -> None:
    """What the loop around the model says: batch, optimizer, clipping, recomputation."""
    for call in script.calls("DataLoader"):
        size = call.get("batch_size", 1)
        if isinstance(size, int) and size > 0:
            reading.strategy["micro_batch"] = size
            reading.note(f"DataLoader(batch_size={size}) becomes micro_batch = {size}.")
        elif size is not None:
            reading.lose(f"batch_size: {shown(size)} is decided when the script runs.")
        break
    for call in script.calls(*_OPTIMIZERS):
        _optimizer(call, reading)
        reading.train |= {"schedule": "constant", "clip_norm": 0.0}
        if script.uses(*_SCHEDULES):
            reading.lose("The schedule of the learning rate is the script's; set train.schedule.")
        break
    for call in script.calls("clip_grad_norm_"):
        norm = call.args[-1] if call.args else call.get("max_norm")
        if isinstance(norm, (int, float)) and norm > 0:
            reading.train["clip_norm"] = float(norm)
            reading.note(f"clip_grad_norm_ becomes train.clip_norm = {norm}.")
        break
    by_hand = any(c.origin.startswith("torch.utils.") for c in script.calls("checkpoint"))
    if by_hand or script.uses(*_RECOMPUTE):
        reading.strategy["recompute"] = "full"
        reading.note("Activation checkpointing becomes recompute = full: every block.")
    if any(call.origin in ("torch.compile", "") for call in script.calls("compile")):
        reading.strategy["compile"] = True
        reading.note("torch.compile becomes compile = true, block by block.")
    found = _number(script, _SEQ_LEN)
    if found:
        reading.job["seq_len"] = found[1]
        reading.note(f"{found[0]} = {found[1]} becomes job.seq_len.")


def _optimizer(call: Call, reading: Reading) -> None:
    kind = _OPTIMIZERS[call.name]
    momentum = call.get("momentum")
    if kind == "sgd" and isinstance(momentum, (int, float)) and momentum > 0:
        kind = "momentum"
        reading.train["momentum"] = float(momentum)
    reading.job["optimizer"] = kind
    reading.train |= _DEFAULTS.get(call.name, {})

    def number(name: str) -> float | None:
        value = call.get(name, 1 if name == "lr" else None)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if value is not None:
            reading.lose(f"{name}: {shown(value)} is decided when the script runs.")
        return None

    betas = call.get("betas")
    known = isinstance(betas, tuple) and all(isinstance(beta, float) for beta in betas)
    set_optimizer(reading, number, betas if known else None)
    reading.note(f"{call.name} becomes job.optimizer = {kind}.")


def _accumulation(script: Script, reading: Reading) -> None:
    """How many micro-batches a step has, and which of them reduce gradients."""
    found = _number(script, _ACCUMULATE)
    if found and found[1] > 0:
        reading.strategy["accumulate"] = found[1]
        reading.note(f"{found[0]} = {found[1]} becomes accumulate = {found[1]}.")
    kind = reading.strategy["kind"]
    if script.uses("set_requires_all_reduce"):
        reading.strategy["grad_sync"] = "local"
        reading.note("set_requires_all_reduce becomes grad_sync = local.")
    elif script.uses("set_requires_gradient_sync", "no_sync"):
        if kind == "ddp" and _only_backward_inside(script):
            reading.strategy["grad_sync"] = "every"
            reading.lose(
                "no_sync around the backward alone stops no reduction of DDP, which needs the "
                "forward inside too; read as what it does, grad_sync = every."
            )
            return
        reading.strategy["grad_sync"] = "last"
        reading.note(
            "no_sync becomes grad_sync = last: gradients stay whole until the last micro-batch."
        )
    elif found and found[1] > 1:
        reading.strategy["grad_sync"] = "every"
        reading.note("Without no_sync every micro-batch reduces its gradients: grad_sync = every.")
        if kind == "zero2":
            reading.strategy["reshard_after_backward"] = True
    if script.uses("set_reshard_after_backward"):
        reading.strategy["reshard_after_backward"] = False
        reading.note("set_reshard_after_backward becomes reshard_after_backward = false.")


def _number(script: Script, names: tuple[str, ...]) -> tuple[str, int] | None:
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
