"""The stacks whose files are tables (YAML or JSON): how each is recognised, and its reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from shardwise.stacks.read import accelerate, axolotl, deepspeed, llama_factory, trainer
from shardwise.stacks.read.imported import Imported

Table = Mapping[str, object]


class StackFile(NamedTuple):
    """How a stack's file is recognised and read."""

    fits: Callable[[Table], bool]
    read: Callable[[Table], Imported]


def _is_accelerate(table: Table) -> bool:
    return "distributed_type" in table or "compute_environment" in table


def _is_deepspeed(table: Table) -> bool:
    keys = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
    return any(key in table for key in keys)


# By the stack's name, in the order in which a file is tried; the most special ones first.
STACK_FILES: dict[str, StackFile] = {
    "accelerate": StackFile(_is_accelerate, accelerate.read),
    "axolotl": StackFile(axolotl.is_axolotl, axolotl.read),
    "llama-factory v1": StackFile(llama_factory.is_version_1, llama_factory.refuse_version_1),
    "llama-factory": StackFile(llama_factory.is_llama_factory, llama_factory.read),
    "trl": StackFile(trainer.is_trl, trainer.read_trl),
    "trainer": StackFile(trainer.is_trainer, trainer.read),
    "deepspeed": StackFile(_is_deepspeed, deepspeed.read_file),
}
