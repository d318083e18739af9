"""Lightning with FSDP2, predicted and measured with two lines (marked below).

torchrun --nproc-per-node 2 examples/lightning_callback.py

On GPUs, name the cluster: CLUSTER=8xH100-SXM torchrun ...
"""

import os
import tempfile

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.integrations.lightning import ShardwiseCallback
from shardwise.integrations.watch import StepWatch

SEQ_LEN, MICRO_BATCH, ACCUMULATE = 64, 4, 2
DEVICES = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,
            use_cache=False,
        )
    )


class Language(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        model, mesh = build(), self.device_mesh["data_parallel"]
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        self.model = fully_shard(model, mesh=mesh)

    def training_step(self, ids: torch.Tensor) -> torch.Tensor:
        loss = self.model(input_ids=ids, labels=ids).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, fused=True)


rows = (torch.randint(0, 256, (512, 1)) + 3 * torch.arange(SEQ_LEN)) % 256
with torch.device("meta"):
    watch = StepWatch(  # (1) from a model on the meta device
        build(),
        seq_len=SEQ_LEN,
        micro_batch=MICRO_BATCH,
        accumulate=ACCUMULATE,
        cluster=os.environ.get("CLUSTER"),
    )
trainer = Trainer(
    accelerator="auto",
    devices=DEVICES,
    strategy=ModelParallelStrategy(data_parallel_size=DEVICES, tensor_parallel_size=1),
    max_steps=16,
    accumulate_grad_batches=ACCUMULATE,
    gradient_clip_val=1.0,
    log_every_n_steps=4,
    logger=CSVLogger(tempfile.mkdtemp()),
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[ShardwiseCallback(watch)],  # (2)
)
trainer.fit(Language(), DataLoader(rows, batch_size=MICRO_BATCH))
