"""A model that its user wrapped with peft, in the transformers Trainer with the callback.

Started by integrations_run.py, as the examples are. BASE is the dtype of frozen weights.
"""

import os
import tempfile

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from shardwise.integrations.transformers import ShardwiseCallback

SEQ_LEN = 64
torch.manual_seed(0)
base = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        use_cache=False,
    )
)
base.to(getattr(torch, os.environ.get("BASE", "float32")))
lora = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
model = peft.get_peft_model(base, lora)
rows = (torch.randint(0, 256, (256, 1)) + 3 * torch.arange(SEQ_LEN)) % 256
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=8,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    optim="adamw_torch_fused",
    logging_steps=4,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
data = [{"input_ids": row, "labels": row} for row in rows]
trainer = Trainer(model=model, args=arguments, train_dataset=data)
watched = ShardwiseCallback(trainer, seq_len=SEQ_LEN)
trainer.add_callback(watched)
trainer.train()
