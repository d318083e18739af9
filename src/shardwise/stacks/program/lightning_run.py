"""Train a model with Lightning: model and sharding in plain torch, the loop in its Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset

from shardwise.stacks.program.compress import communication_hook, powersgd_state
from shardwise.stacks.program.data import Vocabulary, micro_batches
from shardwise.stacks.program.foreign import vocabulary
from shardwise.stacks.program.loss import loss_sum
from shardwise.stacks.program.optimizer import learning_rate, make_optimizer
from shardwise.stacks.program.parallel import build_model
from shardwise.stacks.program.settings import (
    ACCELERATOR,
    ACCUMULATE,
    BUCKET_MIB,
    CLIP_NORM,
    COMPRESS,
    DATA_PARALLEL,
    DEVICE,
    DEVICES,
    KEEP,
    KIND,
    LEARNING_RATE,
    LOG_EVERY,
    MICRO_BATCH,
    NODES,
    OUTPUT,
    PRECISION,
    READS_VOCABULARY,
    REDUCES_LAST,
    RESHARDS_LAST,
    SAVE_EVERY,
    SAVE_MINUTES,
    SAVES,
    SAVES_BETWEEN,
    SCHEDULE,
    SEQ_LEN,
    STEPS,
    SYNCS_LAST,
    THREADS,
    TRACKERS,
    WARMUP_STEPS,
)


class MicroBatches(IterableDataset[torch.Tensor]):
    """Those of one rank; Lightning need not divide them."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def __iter__(self) -> Iterator[torch.Tensor]:
        return micro_batches(self.rank, self.world)


class Training(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = build_model()
            if READS_VOCABULARY:
                Vocabulary.size = vocabulary(self.model)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        batches = MicroBatches(self.global_rank, self.trainer.world_size)
        return DataLoader(batches, batch_size=None)

    def training_step(self, ids: torch.Tensor, index: int) -> torch.Tensor:
        if SYNCS_LAST or REDUCES_LAST or RESHARDS_LAST:
            # Lightning accumulates without telling a sharded module which one is the last.
            last = index % ACCUMULATE == ACCUMULATE - 1
        if SYNCS_LAST:
            self.model.set_requires_gradient_sync(last)
        if REDUCES_LAST:
            self.model.set_requires_all_reduce(last)
        if RESHARDS_LAST:
            self.model.set_reshard_after_backward(last)
        loss = loss_sum(self.model, ids) / (MICRO_BATCH * SEQ_LEN)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.model)
        if SCHEDULE == "constant" and WARMUP_STEPS == 0:
            return {"optimizer": optimizer}
        rates = LambdaLR(optimizer, lambda step: learning_rate(step) / LEARNING_RATE)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": rates, "interval": "step"},
        }


def make_trainer() -> Trainer:
    if DEVICE == "cpu" and THREADS > 0:
        torch.set_num_threads(THREADS)
    if TRACKERS is None:
        loggers: list[Any] = [CSVLogger(OUTPUT)]
        if find_spec("tensorboard"):
            loggers.append(TensorBoardLogger(OUTPUT))
    return Trainer(
        accelerator=ACCELERATOR,
        devices=DEVICES,
        num_nodes=NODES,
        strategy=(
            ModelParallelStrategy(data_parallel_size=DATA_PARALLEL, tensor_parallel_size=1)
            if KIND == "sharded"
            else DDPStrategy(
                gradient_as_bucket_view=True,
                bucket_cap_mb=BUCKET_MIB,
                **({"ddp_comm_state": powersgd_state()} if COMPRESS == "powersgd" else {}),
                **({"ddp_comm_hook": communication_hook()} if COMPRESS is not None else {}),
            )
            if KIND == "ddp"
            else "auto"
        ),
        precision=PRECISION,
        max_steps=STEPS,
        accumulate_grad_batches=ACCUMULATE,
        **({"gradient_clip_val": CLIP_NORM} if CLIP_NORM > 0 else {}),
        log_every_n_steps=LOG_EVERY,
        logger=(
            loggers
            if TRACKERS is None
            else [
                CSVLogger(OUTPUT),
                *([WandbLogger(save_dir=OUTPUT)] if "wandb" in TRACKERS else []),
                *([TensorBoardLogger(OUTPUT)] if "tensorboard" in TRACKERS else []),
                *([MLFlowLogger(save_dir=str(OUTPUT))] if "mlflow" in TRACKERS else []),
            ]
        ),
        enable_checkpointing=SAVES_BETWEEN,
        **(
            {
                "callbacks": [
                    # Without something to monitor, Lightning keeps one or all.
                    ModelCheckpoint(
                        monitor="step",
                        mode="max",
                        save_top_k=KEEP,
                        **({"every_n_train_steps": SAVE_EVERY} if SAVE_EVERY > 0 else {}),
                        **(
                            {"train_time_interval": timedelta(minutes=SAVE_MINUTES)}
                            if SAVE_EVERY == 0
                            else {}
                        ),
                    )
                ]
            }
            if SAVES_BETWEEN
            else {}
        ),
        use_distributed_sampler=False,
    )


if __name__ == "__main__":
    trainer = make_trainer()
    trainer.fit(Training())
    if SAVES:
        trainer.save_checkpoint(OUTPUT / "last.ckpt")
