"""The rows of a DeepSpeed JSON, in the order of reading and of writing."""

from __future__ import annotations

from shardwise.stacks.deepspeed.precision import PRECISION
from shardwise.stacks.deepspeed.recipe import BATCH, TRAIN
from shardwise.stacks.deepspeed.zero import CONTEXT, LOST, OFFLOAD, STAGE, TENSOR
from shardwise.stacks.experts import read_auto_ep, write_auto_ep
from shardwise.stacks.table import Code, Row, Table, lost_rows

_NO_COUNTERPART = "Shardwise has no counterpart"
_WITHOUT: Table = (
    Row("pipeline", why=_NO_COUNTERPART),
    *LOST,
    Row("prescale_gradients", why=_NO_COUNTERPART),
    Row("gradient_predivide_factor", why=_NO_COUNTERPART, inert=(1,)),
    *lost_rows(
        dict.fromkeys(
            ("compression_training", "sparse_attention", "sparse_gradients", "amp",
             "progressive_layer_drop", "curriculum_learning", "data_efficiency", "eigenvalue",
             "hybrid_engine", "compile"),
            _NO_COUNTERPART,
        )
    ),
    Row(
        "activation_checkpointing",
        why="it configures what the script may or may not call; set recompute yourself",
    ),
)  # fmt: skip
_EXPERTS = Code(
    ("expert_parallel.enabled", "expert_parallel.autoep_size"),
    "the second counts only with the first",
    read_auto_ep,
    write_auto_ep,
)
# What is sharded comes first: how a batch is divided, and what is offloaded, depend on it.
READ: Table = (*STAGE, TENSOR, CONTEXT, BATCH, PRECISION, OFFLOAD, _EXPERTS, *TRAIN, *_WITHOUT)
# The keys that TrainingArguments have no counterpart of.
INSIDE_ARGUMENTS: Table = (*STAGE, OFFLOAD, PRECISION, TENSOR)
WRITTEN: Table = (BATCH, *INSIDE_ARGUMENTS, _EXPERTS, CONTEXT, *TRAIN)
