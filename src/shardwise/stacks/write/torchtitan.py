"""Write a run as a torchtitan configuration: a Python file with a function for `--config`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from shardwise.spec.dtype import TORCH_NAMES
from shardwise.spec.foreign_text import one_line
from shardwise.spec.lookup import config_folder
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.spec.train import CheckpointSettings, DataSettings, TrainSettings
from shardwise.stacks.experts import titan_backend
from shardwise.stacks.outcomes import ABSENT, Difference, Differences
from shardwise.stacks.read.source import Script
from shardwise.stacks.read.torchtitan import read
from shardwise.stacks.write.chat_differences import stream_differences
from shardwise.stacks.write.differences import RING, Comparison, Rule, compare
from shardwise.stacks.write.exported import DEFAULT_TARGET, Exported, Target
from shardwise.stacks.write.titan_model import VERSION, scales_positions, write_model
from shardwise.stacks.write.torchrun import torchrun
from shardwise.stacks.write.trackers import trackers_of

NAME = "torchtitan_run.py"
# Steps between saves if the run sets minutes.
SAVE_EVERY = 500

_DTYPES = {dtype: TORCH_NAMES[dtype] for dtype in ("bf16", "fp32")}
OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam"}


_RULES = (
    Rule(("kind",), "torchtitan runs {kind}: it reduces gradients in every micro-batch"),
    Rule(
        ("reshard_after_forward",),
        "fsdp_reshard_after_forward is true or false; the backward gathers from all {shard} ranks",
    ),
    Rule(
        ("grad_sync", "reshard_after_backward"),
        "torchtitan reduces gradients in every micro-batch and gathers parameters again for each",
    ),
    Rule(("prefetch", "forward_prefetch"), "fully_shard prefetches one unit in the backward"),
    Rule(("blocks_per_unit",), "every block is one FSDP unit; collectives are more and smaller"),
    Rule(
        ("sequence_parallel",),
        "torchtitan's tensor parallelism divides what lies between matrices along the sequence too",
    ),
    RING,
    Rule(
        ("recompute",),
        "FullAC recomputes every block, which takes less memory and more time",
    ),
    Rule(("param_dtype",), "torchtitan computes in {param_dtype}"),
    Rule(("reduce_dtype",), "torchtitan reduces gradients in {reduce_dtype}; more bytes move"),
    Rule(("master_dtype",), "torchtitan keeps master weights in {master_dtype}"),
    Rule(("ddp_bucket_mib",), "gradients are all-reduced unit by unit, not in buckets"),
    Rule(("loss", "loss_kernel"), "torchtitan runs no fused kernel; its loss is in chunks"),
    Rule(("loss_chunks",), "chunks must divide the sequence; torchtitan uses {loss_chunks}"),
)


def export(run: RunSpec, target: Target = DEFAULT_TARGET) -> Exported:
    """The configuration for one release of torchtitan; other releases may differ in names."""
    train, data = run.train or TrainSettings(), run.data or DataSettings()
    text = _written(run, train, data)
    found = _comparison(run, text)
    differences = (
        *found.differences,
        *_other_differences(run),
        *_unsupported_settings(run, train, data),
    )
    return Exported(NAME, text, differences, _command(run, target), found.applied)


def applied(run: RunSpec) -> Strategy:
    """The strategy of a run as torchtitan runs it."""
    return _comparison(run, _written(run, TrainSettings(), DataSettings())).applied


def _comparison(run: RunSpec, text: str) -> Comparison:
    """The strategy as torchtitan runs it with this file, and the differences."""
    back = dict(read(Script(text)).strategy)
    mesh = run.strategy.mesh
    if mesh.states == mesh.replicate == 1 and mesh.tensor > 1:
        # With one device to shard over, the kind makes no difference.
        back["kind"] = run.strategy.kind
    return compare(run, back, _RULES)


def _command(run: RunSpec, target: Target) -> str:
    """The shell command that starts the run."""
    path = Path(target.file or NAME)
    if not path.stem.isidentifier():
        raise SpecError(
            f"output: torchtitan imports the file as a module; {path.name!r} is not a name of one: "
            f"write it to a file such as {NAME}"
        )
    command = torchrun(
        run.cluster, f"-m torchtitan.train --module {shlex.quote(path.stem)} --config run"
    )
    # Python finds modules in the current folder and in PYTHONPATH.
    folder = path.parent.as_posix()
    return command if folder == "." else f"PYTHONPATH={shlex.quote(folder)} {command}"


def _written(run: RunSpec, train: TrainSettings, data: DataSettings) -> str:
    """The text of the file."""
    body, imports = write_model(run.model, titan_backend(run))
    strategy = run.strategy
    return _FILE.format(
        title=one_line(f"{run.model.name} on {run.cluster}: {run.strategy}"),
        version=VERSION,
        imports=imports,
        model=body,
        assets=repr(_assets(run, data)),
        losses="CrossEntropyLoss" if strategy.loss == "plain" else _LOSSES,
        loss=_PLAIN if strategy.loss == "plain" else _CHUNKED.format(chunks=_chunks(run)),
        optimizer=_optimizer(run, train),
        schedule=_call("LRSchedulersContainer.Config", _schedule(train)),
        training=_call("TrainingConfig", _training(run, train)),
        parallelism=_call("ParallelismConfig", _parallelism(strategy)),
        recompute=_recompute(strategy),
        compile=_call("CompileConfig", {"enable": strategy.compile, "components": ["model"]}),
        checkpoint=_call("CheckpointManager.Config", _checkpoint(run, train.checkpoint)),
        metrics=_call("MetricsProcessor.Config", _metrics(train)),
        seed=train.seed,
    )


_FILE = """\
# For torchtitan {version}: {title}

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import {losses}
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
        {loss},
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


_LOSSES = "ChunkedLossWrapper, CrossEntropyLoss"
_PLAIN = """\
# All logits at once, as planned; ChunkedLossWrapper around it takes less memory.
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))"""
_CHUNKED = """\
loss=ChunkedLossWrapper.Config(
            num_chunks={chunks},
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        )"""


def _chunks(run: RunSpec) -> int:
    """The smallest number of chunks that is at least the planned one and divides a sequence."""
    length = run.job.seq_len
    wanted = min(run.strategy.loss_chunks, length)
    return next(count for count in range(wanted, length + 1) if length % count == 0)


def _call(name: str, arguments: dict[str, Any]) -> str:
    """The code of a call of `name` with keyword arguments, one per line."""
    lines = "".join(f"            {key}={_literal(value)},\n" for key, value in arguments.items())
    return f"{name}(\n{lines}        )"


def _literal(value: object) -> str:
    """A value as Python code."""
    return 'float("inf")' if value == float("inf") else repr(value)


def _assets(run: RunSpec, data: DataSettings) -> str:
    """The folder with the tokenizer of the model."""
    if getattr(run.model, "pretrained", False):
        return str(config_folder(str(getattr(run.model, "config", ""))))
    if data.tokenizer == "bytes":
        return "./assets/hf/change-me"
    return str(config_folder(data.tokenizer))


def _optimizer(run: RunSpec, train: TrainSettings) -> str:
    """The code of an OptimizersContainer.Config; AdamW if torchtitan lacks the optimizer."""
    name = OPTIMIZERS.get(run.job.optimizer, "AdamW")
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
    """Arguments of LRSchedulersContainer.Config."""
    if train.schedule == "constant":
        return {"warmup_steps": train.warmup_steps, "decay_ratio": 0.0}
    return {
        "warmup_steps": train.warmup_steps,
        "decay_type": train.schedule,
        "min_lr_factor": train.final_learning_rate,
    }


def _training(run: RunSpec, train: TrainSettings) -> dict[str, Any]:
    """Arguments of TrainingConfig; batch sizes are in sequences."""
    strategy = run.strategy
    return {
        "seq_len": run.job.seq_len,
        "local_batch_size": strategy.micro_batch,
        "global_batch_size": strategy.micro_batch * strategy.accumulate * strategy.data_parallel,
        "steps": train.steps,
        # 0 means no clipping in Shardwise; torchtitan would clip to 0.
        "max_norm": train.clip_norm or float("inf"),
        "dtype": _DTYPES.get(strategy.master_dtype, "float32"),
        "mixed_precision_param": _DTYPES.get(strategy.param_dtype, "bfloat16"),
        "mixed_precision_reduce": "float32",
        "enable_cpu_offload": strategy.offloads("parameters"),
        # Graphs would keep memory that the plan does not count.
        "disable_cuda_graphs": True,
    }


def _parallelism(strategy: Strategy) -> dict[str, Any]:
    """Arguments of ParallelismConfig."""
    found = {
        "data_parallel_replicate_degree": strategy.replicate,
        "data_parallel_shard_degree": strategy.shard,
        # "default" reshards blocks, but not the head, which the backward needs at once.
        "fsdp_reshard_after_forward": "default" if strategy.reshard_after_forward else "never",
    }
    if strategy.tensor > 1:
        found["tensor_parallel_degree"] = strategy.tensor
    if strategy.context > 1:
        found["context_parallel_degree"] = strategy.context
    if strategy.expert > 1:
        found["expert_parallel_degree"] = strategy.expert
    return found


def _recompute(strategy: Strategy) -> str:
    """The code of the activation checkpointing, or "None"."""
    if strategy.recompute == "selective":
        return "SelectiveAC.Config()"
    return "FullAC.Config()" if strategy.full_recompute_share else "None"


def _checkpoint(run: RunSpec, settings: CheckpointSettings) -> dict[str, Any]:
    """Arguments of CheckpointManager.Config."""
    pretrained = bool(getattr(run.model, "pretrained", False))
    found: dict[str, Any] = {
        "enable": settings.save or pretrained,
        "interval": settings.every or SAVE_EVERY,
        # torchtitan refuses to keep one: it may be incomplete.
        "keep_latest_k": 2 if settings.keep == 1 else settings.keep,
        "async_mode": "async" if settings.background else "disabled",
        "last_save_model_only": False,
    }
    if pretrained:
        found |= {"initial_load_in_hf": True, "load_only": not settings.save}
    return found


def _metrics(train: TrainSettings) -> dict[str, Any]:
    """Arguments of MetricsProcessor.Config."""
    # TensorBoard is installed with torchtitan.
    trackers = trackers_of(train)
    return {
        "log_freq": train.log_every,
        "enable_tensorboard": "tensorboard" in trackers,
        "enable_wandb": "wandb" in trackers,
    }


def _other_differences(run: RunSpec) -> list[Difference]:
    """Differences that are not about a field of the strategy."""
    differences = Differences()
    if run.strategy.kind == "ddp":
        differences.add(
            "torchtitan calls fully_shard on groups of one device; gradients are all-reduced unit "
            "by unit in float32, not in buckets",
            about="DDP",
        )
    if run.strategy.sharded and not getattr(run.model, "tied", False):
        differences.add(
            "torchtitan makes one unit of the embeddings and one of the last norm and the head; "
            "Shardwise puts both in the root unit",
            about="Units",
        )
    return differences


def _unsupported_settings(
    run: RunSpec, train: TrainSettings, data: DataSettings
) -> list[Difference]:
    """Differences in the optimizer, the model, the data and training settings."""
    differences = Differences()
    if run.job.optimizer not in OPTIMIZERS:
        differences.add(
            "torchtitan uses AdamW, which keeps two states per parameter",
            {"job.optimizer": run.job.optimizer},
        )
    if scales_positions(run.model):
        differences.add(
            "torchtitan scales rotary positions of published Llamas as Llama 3.1 does; Shardwise "
            "does not",
            {"model": ABSENT},
        )
    where = ", ".join(data.path) or data.source or "made-up tokens"
    differences.add(
        "the file names the data set c4, which is downloaded; register others in "
        "torchtitan.hf_datasets.text_datasets",
        {"data": where[:200]},
    )
    differences += stream_differences(run, "torchtitan")
    if data.tokenizer == "bytes" and not getattr(run.model, "pretrained", False):
        differences.add(
            "torchtitan needs a tokenizer; put the model's own in hf_assets_path",
            {"data.tokenizer": "bytes"},
        )
    return [*differences, *_unsupported_training(train)]


def _unsupported_training(train: TrainSettings) -> list[Difference]:
    """Differences in checkpoints, profiling, metrics and trackers."""
    differences, save = Differences(), train.checkpoint
    if save.save and save.every is None:
        differences.add(
            f"torchtitan saves every {SAVE_EVERY} steps, and not when it is asked to stop",
            {"train.checkpoint.minutes": save.minutes},
        )
    if save.to is not None:
        differences.add("torchtitan saves to outputs/checkpoint", {"train.checkpoint.to": save.to})
    if save.keep == 1:
        differences.add("torchtitan keeps at least 2", {"train.checkpoint.keep": 1})
    if train.non_finite == "skip":
        differences.add(
            "torchtitan applies such updates and stops at the next log line after a loss that is "
            "not finite",
            {"train.non_finite": "skip"},
        )
    if train.profile is not None:
        differences.add(
            "no step is profiled; see torchtitan's profiler section", {"train.profile": ABSENT}
        )
    if train.metrics is not None:
        differences.add("nothing is given to Prometheus", {"train.metrics": ABSENT})
    if "mlflow" in (train.trackers or ()):
        differences.add("torchtitan does not support it", {"train.trackers": "mlflow"})
    return differences
