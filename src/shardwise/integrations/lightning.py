"""A callback that predicts and measures the steps of the Lightning Trainer.

watch = StepWatch(model, seq_len=2048, micro_batch=4)
Trainer(callbacks=[ShardwiseCallback(watch)], ...)
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.fsdp import FSDPModule

from shardwise.integrations.watch import StepWatch
from shardwise.report.screen import plain_console


class ShardwiseCallback(Callback):
    """Logs metrics with `log_dict`, so all loggers get them; prints the comparison at the end.

    Create the StepWatch from the model before it is sharded; it may be on the meta device.
    """

    def __init__(self, watch: StepWatch, *, prints: bool = True) -> None:
        self.watch, self._prints = watch, prints

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        wrapped: Any = trainer.strategy.model
        # With FSDP2 a child of the module is sharded and Lightning wraps nothing.
        sharded: list[Any] = [m for m in pl_module.children() if isinstance(m, FSDPModule)]
        model = sharded[0] if len(sharded) == 1 else wrapped
        self.watch.start(model, trainer.optimizers[0], trainer.global_step)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.watch.begin_step()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self.watch.end_step()
        if trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            pl_module.log_dict(self.watch.metrics())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.training:
            self.watch.skip()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        table = self.watch.table()
        if self._prints and table is not None and trainer.is_global_zero:
            plain_console().print(table)
