"""A script for `accelerate launch` that reports how the model was sharded and what it sent."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    accelerator = Accelerator()
    told = {"accelerate says": accelerator.distributed_type.value}
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        # Accelerate has FSDP on GPUs only; what it does to a model is the same on a CPU.
        plugin = FullyShardedDataParallelPlugin()
        if accelerator.mixed_precision != "no":
            plugin.set_mixed_precision(accelerator.mixed_precision)
        accelerator.state.fsdp_plugin = plugin
        accelerator.state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    config = LlamaConfig(**sizes, num_attention_heads=4, vocab_size=64)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    reductions = []
    for _ in range(accelerator.gradient_accumulation_steps):
        with CommDebugMode() as seen, accelerator.accumulate(model):
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
        counts = {str(op): count for op, count in seen.get_comm_counts().items()}
        reductions.append(sum(n for op, n in counts.items() if "reduce_scatter" in op))
    if accelerator.is_main_process:
        print("RESULT " + json.dumps({**told, **described(model), "reductions": reductions}))
    accelerator.end_training()


def described(model: torch.nn.Module) -> dict[str, object]:
    parameter = next(model.parameters())
    blocks = [m for n, m in model.named_modules() if n.endswith(("layers.0", "layers.1"))]
    found = [b._get_fsdp_state()._fsdp_param_group for b in blocks if isinstance(b, FSDPModule)]
    groups = [group for group in found if group is not None]
    return {
        "wrapped": type(model).__name__,
        "sharded": all(isinstance(p, DTensor) for p in model.parameters()),
        "placements": str(getattr(parameter, "placements", "")),
        "master": str(parameter.dtype),
        "resharded": [group.post_forward_mesh_info is not None for group in groups],
        "dtypes": [
            [str(group.mp_policy.param_dtype), str(group.mp_policy.reduce_dtype)]
            for group in groups[:1]
        ],
        "units": sum(isinstance(m, FSDPModule) for m in model.modules()),
    }


main()
