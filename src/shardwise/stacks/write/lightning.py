"""Write a run as a Lightning script: model and sharding in plain torch, the loop in its Trainer."""

from __future__ import annotations

from textwrap import indent

from shardwise.spec.lookup import ModuleRef
from shardwise.spec.run import RunSpec, check_loss
from shardwise.spec.strategy import Strategy
from shardwise.spec.train import CheckpointSettings, TrainSettings
from shardwise.stacks.outcomes import Difference
from shardwise.stacks.write.exported import USUAL, Exported, Target
from shardwise.stacks.write.python import foreign, loop, model
from shardwise.stacks.write.python.data import data_pieces, data_settings, knows_vocabulary
from shardwise.stacks.write.python.loss import chunked_call, chunked_pieces, chunks_loss
from shardwise.stacks.write.python.parallel import parallel_pieces
from shardwise.stacks.write.python.piece import Piece, assemble, lines
from shardwise.stacks.write.python.settings import (
    logged_always,
    on_cpu,
    plain_name,
    settings_piece,
    train_of,
)
from shardwise.stacks.write.python.step import changes_rate, step_pieces
from shardwise.stacks.write.python.unsupported import unsupported_by_step
from shardwise.stacks.write.torchrun import script_command
from shardwise.stacks.write.trackers import trackers_of

NAME = "lightning_run.py"
_PRECISION = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32-true", "fp64": "64-true"}
_LOGGERS = {
    "tensorboard": "TensorBoardLogger",
    "wandb": "WandbLogger",
    "mlflow": "MLFlowLogger",
}


def export(run: RunSpec, target: Target = USUAL) -> Exported:
    """FSDP2 through ModelParallelStrategy, which leaves the sharding to the module."""
    check_loss(run)
    written = model.can_be_written(run)
    constants = model.model_settings(run) if written else foreign.foreign_settings(run)
    optimizer, rate, *_ = step_pieces(run, written)
    pieces = [
        settings_piece(run, constants, data_settings(run)),
        *chunked_pieces(run, written),
        *(model.model_pieces(run) if written else foreign.foreign_pieces(run)),
        *([] if knows_vocabulary(run) else [Piece(foreign.VOCABULARY, ("torch:nn",))]),
        *parallel_pieces(run, written),
        *data_pieces(run),
        optimizer,
        rate,
        Piece(_BATCHES, ("collections.abc:Iterator", "torch", _DATA + "IterableDataset")),
        _module(run, written),
        _trainer(run),
        _main(run),
    ]
    command = script_command(run, target.name(NAME))
    about = f"Train {plain_name(run)} with Lightning ({run.strategy}).\n\n    {command}"
    differences = tuple(map(Difference, _unsupported(run, written)))
    return Exported(NAME, assemble(about, pieces), differences, command, applied(run))


def applied(run: RunSpec) -> Strategy:
    """The strategy of a run as Lightning runs it: its DDP reduces in the last micro-batch only."""
    strategy = run.strategy.but(split_root=False)
    return strategy.but(grad_sync="last") if strategy.kind == "ddp" else strategy


_DATA = "torch.utils.data:"
_BATCHES = '''
class MicroBatches(IterableDataset):
    """Those of one rank; Lightning need not divide them."""

    def __init__(self, *arguments: int) -> None:
        self.arguments = arguments

    def __iter__(self) -> Iterator[torch.Tensor]:
        return micro_batches(*self.arguments)
'''


def _module(run: RunSpec, written: bool) -> Piece:
    strategy = run.strategy
    plan = run
    if strategy.kind == "ddp":
        # Lightning wraps the module itself.
        plan = run._replace(strategy=strategy.but(kind="single", replicate=1))
    build, imports = loop.build_model(plan, written)
    knows = knows_vocabulary(run)
    changes = changes_rate(run)
    code = lines(
        "class Training(LightningModule):",
        "    def __init__(self) -> None:\n        super().__init__()\n        self.model = None",
        "\n",
        "    def configure_model(self) -> None:",
        "        if self.model is not None:\n            return",
        "        device = self.trainer.strategy.root_device",
        strategy.sharded and "        world = self.trainer.world_size",
        indent(build, "    "),
        not knows and "        self.vocab = vocab",
        "        self.model = model",
        "\n",
        "    def train_dataloader(self) -> DataLoader:",
        "        rank, world = self.global_rank, self.trainer.world_size",
        f"        batches = MicroBatches(rank, world{'' if knows else ', self.vocab'})",
        "        return DataLoader(batches, batch_size=None)",
        "\n",
        "    def training_step(self, ids: torch.Tensor, index: int) -> torch.Tensor:",
        _sync(strategy),
        indent(_loss(run, written), " " * 8),
        '        self.log("loss", loss, prog_bar=True, sync_dist=True)',
        "        return loss",
        "\n",
        "    def configure_optimizers(self) -> dict:",
        "        optimizer = make_optimizer(self.model)",
        not changes and '        return {"optimizer": optimizer}',
        changes
        and """
        rates = LambdaLR(optimizer, lambda step: learning_rate(step) / LEARNING_RATE)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": rates, "interval": "step"},
        }
""",
    )
    used = ["torch", "lightning.pytorch:LightningModule", _DATA + "DataLoader", *imports]
    if not chunks_loss(run):
        used.append("torch.nn.functional:cross_entropy")
    if changes:
        used.append("torch.optim.lr_scheduler:LambdaLR")
    return Piece(code, tuple(used))


def _loss(run: RunSpec, written: bool) -> str:
    if chunks_loss(run):
        return f"loss = {chunked_call(written, 'self.model')} / (MICRO_BATCH * SEQ_LEN)"
    return lines(
        f"logits = {_logits(run, written)}",
        isinstance(run.model, ModuleRef) and 'logits = getattr(logits, "logits", logits)',
        f"logits = {'logits' if run.strategy.param_dtype == 'fp64' else 'logits.float()'}",
        "loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())",
    )


def _logits(run: RunSpec, written: bool) -> str:
    if written or isinstance(run.model, ModuleRef):
        return "self.model(ids[:, :-1])"
    return "self.model(input_ids=ids[:, :-1]).logits"


def _sync(strategy: Strategy) -> str:
    """Lightning accumulates without telling a sharded module which micro-batch is the last."""
    calls = loop.sync_calls(strategy, "self.model")
    if not calls:
        return ""
    return indent(lines("last = index % ACCUMULATE == ACCUMULATE - 1", *calls), " " * 8)


def _trainer(run: RunSpec) -> Piece:
    strategy, train = run.strategy, train_of(run)
    how, imports = _strategy(strategy)
    # The policy of fully_shard casts where parameters are gathered.
    precision = "32-true" if strategy.sharded else _PRECISION[strategy.param_dtype]
    if strategy.master_dtype == strategy.param_dtype == "fp64":
        precision = "64-true"
    loggers, logger_imports = _loggers(train)
    code = lines(
        "def make_trainer() -> Trainer:",
        train.threads is not None and on_cpu(run) and "    torch.set_num_threads(THREADS)",
        train.trackers is None and _WHERE_INSTALLED,
        "    return Trainer(",
        f'        accelerator="{"cpu" if on_cpu(run) else "gpu"}",',
        f"        devices={run.cluster.devices_per_node},",
        f"        num_nodes={run.cluster.nodes},",
        f"        strategy={how},",
        f'        precision="{precision}",',
        "        max_steps=STEPS,",
        "        accumulate_grad_batches=ACCUMULATE,",
        bool(train.clip_norm) and "        gradient_clip_val=CLIP_NORM,",
        f"        log_every_n_steps={1 if logged_always(run) else 'LOG_EVERY'},",
        f"        logger={loggers},",
        *_saves(run),
        "        use_distributed_sampler=False,",
        "    )",
    )
    used = ["lightning.pytorch:Trainer", *logger_imports]
    if _saves_between(train.checkpoint):
        used.append("lightning.pytorch.callbacks:ModelCheckpoint")
        used += [] if train.checkpoint.every else ["datetime:timedelta"]
    return Piece(code, (*used, *imports))


_WHERE_INSTALLED = """
    loggers = [CSVLogger(OUTPUT)]
    if find_spec("tensorboard"):
        loggers.append(TensorBoardLogger(OUTPUT))
"""


def _loggers(train: TrainSettings) -> tuple[str, tuple[str, ...]]:
    names = ["CSVLogger", *(_LOGGERS[name] for name in trackers_of(train))]
    imports = tuple(f"lightning.pytorch.loggers:{name}" for name in names)
    if train.trackers is None:
        return "loggers", (*imports, "importlib.util:find_spec")
    places = {"WandbLogger": "save_dir=OUTPUT", "MLFlowLogger": "save_dir=str(OUTPUT)"}
    made = [f"{name}({places.get(name, 'OUTPUT')})" for name in names]
    return f"[{', '.join(made)}]", imports


def _strategy(strategy: Strategy) -> tuple[str, tuple[str, ...]]:
    if strategy.kind == "single":
        return '"auto"', ()
    home = "lightning.pytorch.strategies:"
    if strategy.sharded:
        sizes = f"data_parallel_size={strategy.data_parallel}, tensor_parallel_size=1"
        return f"ModelParallelStrategy({sizes})", (f"{home}ModelParallelStrategy",)
    bucket = "" if strategy.ddp_bucket_mib is None else ", bucket_cap_mb=BUCKET_MIB"
    return f"DDPStrategy(gradient_as_bucket_view=True{bucket})", (f"{home}DDPStrategy",)


def _saves(run: RunSpec) -> list[str]:
    settings = train_of(run).checkpoint
    if not _saves_between(settings):
        # Otherwise Lightning saves by a rule of its own.
        return ["        enable_checkpointing=False,"]
    often = f"timedelta(minutes={settings.minutes:g})"
    when = "every_n_train_steps=SAVE_EVERY" if settings.every else f"train_time_interval={often}"
    return [
        "        callbacks=[",
        # Without something to monitor, Lightning keeps one or all.
        "            ModelCheckpoint(",
        f'                monitor="step", mode="max", save_top_k={settings.keep or -1}, {when}',
        "            )",
        "        ],",
    ]


def _saves_between(settings: CheckpointSettings) -> bool:
    """Whether anything is saved before the end."""
    return settings.save and bool(settings.every or settings.minutes)


def _main(run: RunSpec) -> Piece:
    return Piece(
        lines(
            'if __name__ == "__main__":',
            "    trainer = make_trainer()",
            "    trainer.fit(Training())",
            train_of(run).checkpoint.save and '    trainer.save_checkpoint(OUTPUT / "last.ckpt")',
        )
    )


def _unsupported(run: RunSpec, written: bool) -> tuple[str, ...]:
    strategy, train = run.strategy, train_of(run)
    found = list(unsupported_by_step(run, written))
    if strategy.kind == "ddp" and strategy.accumulate > 1 and strategy.grad_sync == "every":
        found.append("grad_sync = every: Lightning reduces in the last micro-batch only.")
    if strategy.kind == "ddp" and strategy.param_dtype == "fp16":
        found.append("param_dtype = fp16: Lightning scales the loss and skips steps that overflow.")
    found.append(
        "train.non_finite: Lightning applies gradients that are not finite; it has no guard."
    )
    if train.checkpoint.save:
        found.append(
            "train.checkpoint: Lightning saves in the foreground, without checksums, and not on a "
            "signal; fit(ckpt_path=...) resumes, with the data from the beginning."
        )
        if train.checkpoint.every and train.checkpoint.minutes:
            found.append(
                f"train.checkpoint.minutes: Lightning saves every {train.checkpoint.every} steps "
                "only."
            )
        if train.checkpoint.to is not None:
            found.append("train.checkpoint.to: checkpoints are written to the folder OUTPUT.")
    found.append("train.restart: hanging ranks are not detected and not restarted.")
    return tuple(found)
