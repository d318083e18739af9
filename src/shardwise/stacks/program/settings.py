"""The settings of a run. `shardwise export` writes those of yours in their place.

Settings are written at the top of a script, as far as it uses them. Choices decide what is left of
the program, and are written where they are used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.stacks.program import own_code

# The model.
VOCAB = 256
LAYERS = 2
HIDDEN = 64
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
FFN = 96
ROPE_THETA = 10000.0
NORM_EPSILON = 1e-6
INITIAL_STD = 0.02
CONFIG: Any = "gpt2"

# A step.
SEQ_LEN = 32
MICRO_BATCH = 2
ACCUMULATE = 2

# The data.
TOKENS = Path("tokens")

# The parallel plan.
DEVICE = "cpu"
REPLICATE = 1
SHARD = 2
CONTEXT = 1
TENSOR = 1
BLOCKS_PER_UNIT = 1
RESHARD_AFTER_FORWARD: bool | int = True
BACKWARD_PREFETCH = 1
FORWARD_PREFETCH = 0
BUCKET_MIB: Any = None
POWERSGD_RANK = 4
POWERSGD_START = 1000
RECOMPUTE_SHARE = 1.0
LOSS_CHUNKS = 8

# The optimizer.
LEARNING_RATE = 1e-3
WARMUP_STEPS = 0
FINAL_SHARE = 0.1
BETAS = (0.9, 0.95)
EPSILON = 1e-8
MOMENTUM = 0.9
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0

# The run.
STEPS = 10
SEED = 0
LOG_EVERY = 1
SAVE_EVERY = 0
THREADS = 0
OUTPUT = Path("trained")

# Choices: the model.
MODEL = "written"  # by this program; or by "transformers", or a "factory"
BLOCKS: str | None = "model.layers"
ACTIVATION = nn.functional.silu
QKV_BIAS = False
OUTPUT_BIAS = False
MLP_BIAS = False
QK_NORM = False
GROUPED = True
HAS_HEAD = True
TIED = False
PRETRAINED = False
CONFIG_IS_PATH = True
ATTENTION = "sdpa"
META_INIT = True
ON_META = True
FACTORY = own_code.build

# Choices: the data.
DATA = "synthetic"  # or "tokens" of text, or the "own" iterable of the user
READS_VOCABULARY = False
SHUFFLE = True
SOURCE = own_code.batches

# Choices: the parallel plan.
KIND = "sharded"  # or "ddp", or "single"
WRAPS_DDP = False
SYNCS_BUFFERS: Any = True
COMPRESS: Any = None  # or "bf16", "fp16", "powersgd"
DIVIDED = False
SEQUENCE_PARALLEL = True
TENSOR_ACROSS_NODES = False
HEAD_REPEATS = 1
SEQUENCE_PARTS = 1
PLACES = False
OFFLOAD = False
RECOMPUTE = "none"  # or "selective", or "full"
COMPILE = False
CHUNKED_LOSS = False
AUTOCAST = False
PARAM_DTYPE = torch.float32
REDUCE_DTYPE = torch.float32
MASTER_DTYPE = torch.float32
UPCASTS = True
SYNCS_LAST = False
REDUCES_LAST = False
RESHARDS_LAST = False
SKIPS_SYNC = False

# Choices: the loop.
BACKEND = "gloo"
OPTIMIZER = "adamw"  # or "adam", "momentum", "sgd"
FUSED = True
SCHEDULE = "cosine"
NON_FINITE = "stop"  # or "skip"
SAVES = False
SAVES_BETWEEN = False

# Choices: Lightning's Trainer.
ACCELERATOR = "cpu"
DEVICES = 2
NODES = 1
PRECISION: Any = "32-true"
DATA_PARALLEL = 2
TRACKERS: tuple[str, ...] | None = ()
SAVE_MINUTES = 0.0
KEEP = -1
