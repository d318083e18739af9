"""A callback that predicts and measures the steps of the transformers Trainer.

trainer = Trainer(...)
trainer.add_callback(ShardwiseCallback(trainer, seq_len=2048))
trainer.train()
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

from shardwise.integrations.watch import StepWatch
from shardwise.report.screen import plain_console
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.optimizer import Optimizer

_OPTIMIZERS: dict[str, Optimizer] = {"sgd": "sgd", "lion_32bit": "lion"}


class ShardwiseCallback(TrainerCallback):
    """Logs metrics through the Trainer, so its trackers get them; prints the comparison at the end.

    `watch` holds the prediction and, after a few steps, the measurement.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        seq_len: int,
        cluster: str | ClusterSpec | None = None,
        prints: bool = True,
        **strategy: object,
    ) -> None:
        """Create the callback before `train`.

        `seq_len` is the sequence length of the batches in tokens. `cluster` and `strategy` are as
        for `StepWatch`; other settings are read from the Trainer.
        """
        args = trainer.args
        known: dict[str, Any] = {
            "micro_batch": args.per_device_train_batch_size,
            "accumulate": args.gradient_accumulation_steps,
            # accelerate reduces gradients in the last micro-batch only.
            "grad_sync": "last",
            "recompute": "full" if args.gradient_checkpointing else "none",
            "compile": args.torch_compile,
            **strategy,
        }
        self._trainer, self._prints = trainer, prints
        assert trainer.model is not None
        self.watch = StepWatch(
            trainer.model,
            seq_len=seq_len,
            optimizer=_OPTIMIZERS.get(str(getattr(args.optim, "value", args.optim)), "adamw"),
            clips=bool(args.max_grad_norm),
            cluster=cluster,
            **known,
        )

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the watch; the Trainer has wrapped the model by then."""
        trainer: Any = self._trainer
        wrapped = trainer.model_wrapped
        casts: dict[str, object] = {}
        if type(wrapped).__name__ == "DistributedDataParallel":
            low = trainer.accelerator.mixed_precision
            casts = {"param_dtype": low} if low in ("bf16", "fp16") else {}
        self.watch.start(wrapped, trainer.optimizer, state.global_step, **casts)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.watch.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.watch.end_step()
        # The Trainer's own callback runs first and decides when to log.
        if control.should_log:
            self._trainer.log(self.watch.metrics())
            # Trainer.log resets should_log; the Trainer must still write its own values.
            control.should_log = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.watch.skip()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.watch.skip()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        table = self.watch.table()
        if self._prints and table is not None and state.is_world_process_zero:
            plain_console().print(table)
