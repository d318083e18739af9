"""The transformers Trainer, predicted and measured with two lines (marked below).

torchrun --nproc-per-node 2 examples/trainer_callback.py

On GPUs, name the cluster: CLUSTER=8xH100-SXM torchrun ...
"""

import os
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from shardwise.integrations.transformers import ShardwiseCallback

SEQ_LEN = 64
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
rows = (torch.randint(0, 256, (256, 1)) + 3 * torch.arange(SEQ_LEN)) % 256
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=16,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    optim="adamw_torch_fused",
    logging_steps=4,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    # accelerate has no FSDP on CPUs; there, the Trainer uses DDP.
    fsdp=True,
    fsdp_config={"version": 2, "reshard_after_forward": True},
    use_cpu=not torch.cuda.is_available(),
)
data = [{"input_ids": row, "labels": row} for row in rows]
trainer = Trainer(model=model, args=arguments, train_dataset=data)
watched = ShardwiseCallback(trainer, seq_len=SEQ_LEN, cluster=os.environ.get("CLUSTER"))  # (1)
trainer.add_callback(watched)  # (2)
trainer.train()
