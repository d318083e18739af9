"""A configuration for torchtitan: a Python file with a function that its `--config` names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.spec.dtype import TORCH_NAMES
from shardwise.spec.lookup import config_folder
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.spec.train import CheckpointSettings, DataSettings, TrainSettings
from shardwise.stacks.write.exported import Exported
from shardwise.stacks.write.quoting import comment
from shardwise.stacks.write.titan_model import VERSION, stretches, write_model
from shardwise.stacks.write.torchrun import torchrun
from shardwise.stacks.write.trackers import trackers_of

NAME = "torchtitan_run.py"
# Steps between saves where the run counts minutes.
SAVE_EVERY = 500

_DTYPES = {dtype: TORCH_NAMES[dtype] for dtype in ("bf16", "fp32")}
_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam"}


def export(run: RunSpec) -> Exported:
    """The file, for the release above; others may name things differently."""
    train, data = run.train or TrainSettings(), run.data or DataSettings()
    body, imports = write_model(run.model)
    text = _FILE.format(
        title=comment(f"{run.model.name} on {run.cluster}: {run.strategy}"),
        version=VERSION,
        imports=imports,
        model=body,
        assets=repr(_assets(run, data)),
        optimizer=_optimizer(run, train),
        schedule=_call("LRSchedulersContainer.Config", _schedule(train)),
        training=_call("TrainingConfig", _training(run, train)),
        parallelism=_call("ParallelismConfig", _parallelism(run.strategy)),
        recompute=_recompute(run.strategy),
        compile=_call("CompileConfig", {"enable": run.strategy.compile, "components": ["model"]}),
        checkpoint=_call("CheckpointManager.Config", _checkpoint(run, train.checkpoint)),
        metrics=_call("MetricsProcessor.Config", _metrics(train)),
        seed=train.seed,
    )
    losses = (*_strategy_losses(run), *_run_losses(run, train, data))
    command = torchrun(run.cluster, f"-m torchtitan.train --module {Path(NAME).stem} --config run")
    return Exported(NAME, text, losses, command)


_FILE = """\
# For torchtitan {version}: {title}

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.config_utils import decoder_vocab_size
{imports}
from torchtitan.trainer import Trainer


{model}

def run() -> Trainer.Config:
    spec = model_spec()
    return Trainer.Config(
        model_spec=spec,
        # A folder with the tokenizer of the model.
        hf_assets_path={assets},
        # Change it: a data set that torchtitan knows, or one of your own.
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        # All logits at once, as planned; ChunkedLossWrapper around it takes less memory.
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        optimizer={optimizer},
        lr_scheduler={schedule},
        training={training},
        parallelism={parallelism},
        activation_checkpoint={recompute},
        compile={compile},
        checkpoint={checkpoint},
        metrics={metrics},
        debug=DebugConfig(seed={seed}),
    )
"""


def _call(name: str, arguments: dict[str, Any]) -> str:
    lines = "".join(f"            {key}={_literal(value)},\n" for key, value in arguments.items())
    return f"{name}(\n{lines}        )"


def _literal(value: object) -> str:
    return 'float("inf")' if value == float("inf") else repr(value)


def _assets(run: RunSpec, data: DataSettings) -> str:
    if getattr(run.model, "pretrained", False):
        return str(config_folder(str(getattr(run.model, "config", ""))))
    if data.tokenizer == "bytes":
        return "./assets/hf/change-me"
    return str(config_folder(data.tokenizer))


def _optimizer(run: RunSpec, train: TrainSettings) -> str:
    name = _OPTIMIZERS.get(run.job.optimizer, "AdamW")
    settings = {
        "lr": train.learning_rate,
        "betas": (train.beta1, train.beta2),
        "eps": train.epsilon,
        "weight_decay": train.weight_decay,
    }
    return f"""OptimizersContainer.Config(
            param_groups=[
                ParamGroupConfig(
                    pattern=r".*",
                    optimizer_name="{name}",
                    optimizer_kwargs={settings!r},
                )
            ]
        )"""


def _schedule(train: TrainSettings) -> dict[str, Any]:
    if train.schedule == "constant":
        return {"warmup_steps": train.warmup_steps, "decay_ratio": 0.0}
    return {
        "warmup_steps": train.warmup_steps,
        "decay_type": "cosine",
        "min_lr_factor": train.final_learning_rate,
    }


def _training(run: RunSpec, train: TrainSettings) -> dict[str, Any]:
    strategy = run.strategy
    return {
        "seq_len": run.job.seq_len,
        "local_batch_size": strategy.micro_batch,
        "global_batch_size": strategy.micro_batch * strategy.accumulate * strategy.devices,
        "steps": train.steps,
        # A norm of 0 would be the end of all gradients there.
        "max_norm": train.clip_norm or float("inf"),
        "dtype": _DTYPES.get(strategy.master_dtype, "float32"),
        "mixed_precision_param": _DTYPES.get(strategy.param_dtype, "bfloat16"),
        "mixed_precision_reduce": "float32",
        "enable_cpu_offload": strategy.offload,
        # Graphs would keep memory that the plan does not count.
        "disable_cuda_graphs": True,
    }


def _parallelism(strategy: Strategy) -> dict[str, Any]:
    return {
        "data_parallel_replicate_degree": strategy.replicate,
        "data_parallel_shard_degree": strategy.shard,
        # "default" is true for blocks and false for the head, which is needed again at once.
        "fsdp_reshard_after_forward": "default" if strategy.reshard_after_forward else "never",
    }


def _recompute(strategy: Strategy) -> str:
    if strategy.recompute == "selective":
        return "SelectiveAC.Config()"
    return "FullAC.Config()" if strategy.full_recompute_share else "None"


def _checkpoint(run: RunSpec, settings: CheckpointSettings) -> dict[str, Any]:
    pretrained = bool(getattr(run.model, "pretrained", False))
    found: dict[str, Any] = {
        "enable": settings.save or pretrained,
        "interval": settings.every or SAVE_EVERY,
        # One alone is refused: it may be half written.
        "keep_latest_k": 2 if settings.keep == 1 else settings.keep,
        "async_mode": "async" if settings.background else "disabled",
        "last_save_model_only": False,
    }
    if pretrained:
        found |= {"initial_load_in_hf": True, "load_only": not settings.save}
    return found


def _metrics(train: TrainSettings) -> dict[str, Any]:
    # Whoever has torchtitan has TensorBoard: it is installed with it.
    trackers = trackers_of(train)
    return {
        "log_freq": train.log_every,
        "enable_tensorboard": "tensorboard" in trackers,
        "enable_wandb": "wandb" in trackers,
    }


def _strategy_losses(run: RunSpec) -> list[str]:
    s = run.strategy
    found = []
    if s.kind == "ddp":
        found.append(
            "strategy.kind: ddp is fully_shard on groups of one there; gradients are all-reduced "
            "unit by unit in float32, not in buckets as they become ready"
        )
    if s.sharded and not getattr(run.model, "tied", False):
        found.append(
            "strategy: the root unit is two there, the embeddings and the last norm with the head; "
            "the embeddings are gathered again in the backward where blocks are"
        )
    reshard = s.reshard_after_forward
    if reshard is not None and not isinstance(reshard, bool):
        found.append(
            f"strategy.reshard_after_forward: {reshard} is true there; the backward gathers from "
            f"all {s.shard} devices, not from {reshard}"
        )
    if s.accumulate > 1 and s.grad_sync != "every" and s.devices > 1:
        found.append(
            f"strategy.grad_sync: '{s.grad_sync}' is 'every' there; gradients are reduced after "
            f"each of the {s.accumulate} micro-batches of a step"
        )
    if s.accumulate > 1 and s.sharded and not s.reshard_after_backward:
        found.append(
            "strategy.reshard_after_backward: false is true there; parameters are gathered again "
            f"for each of the {s.accumulate} micro-batches of a step"
        )
    if s.sharded and (s.prefetch != 1 or s.forward_prefetch):
        found.append(
            f"strategy.prefetch: {s.prefetch} and forward_prefetch {s.forward_prefetch} are what "
            "fully_shard does by itself there: one unit ahead in the backward"
        )
    if s.sharded and s.blocks_per_unit > 1:
        found.append(
            f"strategy.blocks_per_unit: {s.blocks_per_unit} is 1 there; "
            "collectives are more and smaller"
        )
    if isinstance(s.recompute, float) and 0 < s.recompute < 1:
        found.append(
            f"strategy.recompute: {s.recompute} is full there; all blocks recompute, which takes "
            "less memory and more time"
        )
    if s.param_dtype not in _DTYPES:
        found.append(f"strategy.param_dtype: {s.param_dtype} is bfloat16 there")
    if s.sharded and s.reduce_dtype != "fp32":
        found.append(
            f"strategy.reduce_dtype: {s.reduce_dtype} is float32 there; reductions move more bytes"
        )
    if s.master_dtype not in _DTYPES:
        found.append(f"strategy.master_dtype: {s.master_dtype} is float32 there")
    return found


def _run_losses(run: RunSpec, train: TrainSettings, data: DataSettings) -> list[str]:
    found = []
    if run.job.optimizer not in _OPTIMIZERS:
        found.append(
            f"job.optimizer: {run.job.optimizer} is AdamW there, which keeps two states for each "
            "parameter"
        )
    if stretches(run.model):
        found.append(
            "model: positions of published Llamas are stretched there as those of Llama 3.1 are; "
            "here they are those of Llama 3"
        )
    where = ", ".join(data.path) or data.source or "made-up tokens"
    found.append(
        f"data: {where[:200]!r} is the data set c4 there, which is fetched; others are registered "
        "in torchtitan.hf_datasets.text_datasets"
    )
    if data.tokenizer == "bytes" and not getattr(run.model, "pretrained", False):
        found.append(
            "data.tokenizer: bytes are no tokenizer there; put the one of the model where "
            "hf_assets_path says"
        )
    save = train.checkpoint
    if save.save and save.every is None:
        found.append(
            f"train.checkpoint.minutes: {save.minutes:g} is every {SAVE_EVERY} steps there; a run "
            "that is asked to stop does not save first"
        )
    if save.to is not None:
        found.append(f"train.checkpoint.to: {save.to!r} is outputs/checkpoint there")
    if save.keep == 1:
        found.append("train.checkpoint.keep: 1 is 2 there; one alone is refused")
    if train.non_finite == "skip":
        found.append(
            "train.non_finite: 'skip' is no choice there; a loss that is not finite ends the run "
            "at the next log line, and updates until then are made"
        )
    if train.profile is not None:
        found.append("train.profile: nothing is profiled there; see torchtitan's profiler section")
    if "mlflow" in (train.trackers or ()):
        found.append("train.trackers: mlflow is not known there")
    return found
