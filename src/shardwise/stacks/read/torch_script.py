"""Read a training script that uses FSDP1, FSDP2 or DDP directly, and its training loop."""

from __future__ import annotations

from shardwise.spec.record import SpecError
from shardwise.stacks.read import fsdp1, torchtitan, trainer_script
from shardwise.stacks.read.imported import Imported, Reading
from shardwise.stacks.read.model_name import set_model_of_script
from shardwise.stacks.read.objective import objective_of_script
from shardwise.stacks.read.source import Call, Script, Symbol
from shardwise.stacks.read.torch_hooks import read_compression
from shardwise.stacks.read.torch_loop import read_accumulation, read_loop
from shardwise.stacks.read.torch_sharding import (
    WITH_DDP,
    read_ddp,
    read_fully_shard,
    read_precision,
)

_LIGHTNING = (
    "the strategy of Lightning's Trainer is not read: write it into a run.toml, such as "
    'strategy = "ddp" for DDPStrategy'
)


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
        read_fully_shard(script, new, reading)
    elif replicated:
        reading = Reading(WITH_DDP)
        read_ddp(replicated, reading)
        read_compression(script, reading)
    elif trainer_script.has_arguments(script):
        return trainer_script.read(script)
    else:
        raise SpecError(_nothing_found(script))
    others = [name for name, calls in (("fully_shard", new), ("DDP", replicated)) if calls]
    if old and others:
        reading.warn(f"The script also uses {' and '.join(others)}; it was read as FSDP1.")
    read_precision(script, reading)
    read_loop(script, reading)
    read_accumulation(script, reading)
    set_model_of_script(script, reading)
    return reading.finish()


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
