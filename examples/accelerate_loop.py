"""An accelerate loop, predicted and measured with four lines (marked below).

torchrun --nproc-per-node 2 examples/accelerate_loop.py

On GPUs, name the cluster: CLUSTER=8xH100-SXM accelerate launch --use_fsdp --fsdp_version 2 ...
"""

import os

import torch
from accelerate import Accelerator
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.integrations.watch import StepWatch

SEQ_LEN, MICRO_BATCH, ACCUMULATE = 64, 4, 2
accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE, cpu=not torch.cuda.is_available())
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        use_cache=False,
    )
)
watch = StepWatch(  # (1) before the model is wrapped
    model,
    seq_len=SEQ_LEN,
    micro_batch=MICRO_BATCH,
    accumulate=ACCUMULATE,
    grad_sync="last",
    cluster=os.environ.get("CLUSTER"),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
model, optimizer = accelerator.prepare(model, optimizer)
watch.start(model, optimizer)  # (2) after

for step in range(16):
    with watch.step():  # (3) around all micro-batches of a step
        for _ in range(ACCUMULATE):
            with accelerator.accumulate(model):
                start = torch.randint(0, 256, (MICRO_BATCH, 1))
                ids = ((start + 3 * torch.arange(SEQ_LEN)) % 256).to(accelerator.device)
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    if step % 4 == 3:
        values = watch.metrics()  # (4) for any tracker, such as accelerator.log(values)
        accelerator.print(f"step {step + 1}: loss {loss.item():.3f}", values)

if accelerator.is_main_process:
    Console().print(watch.table())
accelerator.end_training()
