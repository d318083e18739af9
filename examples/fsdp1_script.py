"""A typical FSDP1 training script: `shardwise import` reads it without running it."""

import functools

import torch
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

GRADIENT_ACCUMULATION_STEPS = 8

precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
wrap = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})


def main(dataset, folder):
    torch.distributed.init_process_group("nccl")
    model = FullyShardedDataParallel(
        AutoModelForCausalLM.from_pretrained(folder),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        mixed_precision=precision,
        auto_wrap_policy=wrap,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        cpu_offload=CPUOffload(offload_params=False),
        limit_all_gathers=True,
        use_orig_params=True,
        device_id=torch.cuda.current_device(),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
    for index, batch in enumerate(DataLoader(dataset, batch_size=1)):
        last = (index + 1) % GRADIENT_ACCUMULATION_STEPS == 0
        if last:
            model(**batch).loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        else:
            with model.no_sync():
                model(**batch).loss.backward()
