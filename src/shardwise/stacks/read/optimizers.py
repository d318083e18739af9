"""Names of optimizers in other stacks, and their counterparts in Shardwise."""

from __future__ import annotations

from typing import get_args

from shardwise.spec.job import Job
from shardwise.stacks.outcomes import repr_text
from shardwise.stacks.read.imported import Reading

# transformers' names, and those that axolotl adds.
NAMES = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_apex_fused": "adamw",
    "paged_adamw_32bit": "adamw",
    "adamw_torch_8bit": "adamw-8bit",
    "ao_adamw_8bit": "adamw-8bit",
    "adamw_bnb_8bit": "adamw-8bit",
    "adamw_8bit": "adamw-8bit",
    "paged_adamw_8bit": "adamw-8bit",
    "adamw_torch_4bit": "adamw-4bit",
    "ao_adamw_4bit": "adamw-4bit",
    "ao_adamw_fp8": "adamw-fp8",
    "adafactor": "adafactor",
    "muon": "muon",
    "sgd": "sgd",
    "lion_32bit": "lion",
    "lion_pytorch": "lion",
    "paged_lion_32bit": "lion",
}
# Optimizers with 8-bit states of bitsandbytes, which cannot update sharded tensors.
BITSANDBYTES = ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit")


def known_optimizers() -> tuple[str, ...]:
    """The values that `job.optimizer` can have."""
    return get_args(Job.model_fields["optimizer"].annotation)


def set_named_optimizer(reading: Reading, key: str, name: object) -> None:
    """Set `job.optimizer` from another stack's name, or report the name as lost.

    Call it after the strategy is read: the kind decides some warnings.
    """
    kind = NAMES.get(name) if isinstance(name, str) else None
    if kind is None:
        reading.lose(key, f"{repr_text(name)} is unknown to Shardwise; set job.optimizer")
        return
    if kind not in known_optimizers():
        reading.lose(key, f"{name} is {kind}, which Shardwise does not have; set job.optimizer")
        return
    reading.given(key, {"job.optimizer": kind}, name, naming="pair")
    if str(name).startswith("paged_"):
        reading.lose(key, f"{name} pages states to host memory; Shardwise keeps them on devices")
    if name in BITSANDBYTES and reading.strategy.get("kind") in ("zero2", "zero3"):
        reading.lose(
            key,
            f"{name} is bitsandbytes', which fails on the tensors of FSDP2; planned as torchao's, "
            "which transformers calls adamw_torch_8bit",
        )
