"""Write a run as a script of NVIDIA's Megatron-Bridge: a ConfigContainer and a call of `pretrain`.

It cannot be installed without CUDA, so no test runs it. The names of classes and settings are those
of its documentation:
https://docs.nvidia.com/nemo/megatron-bridge/latest/parallelisms.html
https://docs.nvidia.com/nemo/megatron-bridge/latest/megatron-lm-to-megatron-bridge.html
https://docs.nvidia.com/nemo/megatron-bridge/latest/training/megatron-fsdp.html
https://docs.nvidia.com/nemo/megatron-bridge/latest/training/activation-recomputation.html
https://docs.nvidia.com/nemo/megatron-bridge/latest/training/entry-points.html
"""

from __future__ import annotations

from typing import Any

from shardwise.spec.foreign_text import one_line
from shardwise.spec.huggingface import to_config
from shardwise.spec.lookup import config_folder
from shardwise.spec.model import ModelSpec
from shardwise.spec.recompute import blocks_of_share
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.spec.train import DataSettings, TrainSettings
from shardwise.stacks.experts import megatron_balance, megatron_dispatcher
from shardwise.stacks.write.chat_differences import stream_differences
from shardwise.stacks.write.differences import Comparison, compare
from shardwise.stacks.write.exported import DEFAULT_TARGET, Exported, Target
from shardwise.stacks.write.megatron_differences import RULES, other_differences
from shardwise.stacks.write.python.constants import quoted
from shardwise.stacks.write.torchrun import torchrun

NAME = "megatron_run.py"
# Steps between saves if the run sets minutes.
SAVE_EVERY = 500

# Families that Megatron-Bridge converts from transformers, with their model classes.
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
# data_parallel_sharding_strategy for each kind that runs with Megatron's FSDP.
_SHARDED = {"zero2": "optim_grads", "zero3": "optim_grads_params"}
# cp_comm_type of each context method: a ring, or an all-to-all of heads for tokens.
_CONTEXT = {"ring": "p2p", "ulysses": "a2a"}


def export(run: RunSpec, target: Target = DEFAULT_TARGET) -> Exported:
    """The script of a run, which torchrun starts."""
    _check(run)
    train, data = run.train or TrainSettings(), run.data or DataSettings()
    found = _comparison(run)
    differences = (
        *found.differences,
        *other_differences(run, found.applied, SAVE_EVERY),
        *stream_differences(run, "Megatron-Bridge"),
    )
    command = torchrun(run.cluster, target.name(NAME))
    return Exported(NAME, _written(run, train, data), differences, command, found.applied)


def applied(run: RunSpec) -> Strategy:
    """The strategy of a run as Megatron-Bridge runs it."""
    _check(run)
    return _comparison(run).applied


def _check(run: RunSpec) -> None:
    """Raise SpecError for models and devices that Megatron-Bridge cannot train."""
    model = run.model
    if not isinstance(model, ModelSpec) or model.family not in _CLASSES:
        raise SpecError(
            f"model: Megatron-Bridge is written for {', '.join(_CLASSES)}; use torchtitan, "
            "accelerate or python"
        )
    if run.cluster.device.is_cpu:
        raise SpecError("cluster: Megatron-Bridge trains on GPUs only")


def _comparison(run: RunSpec) -> Comparison:
    """The strategy as Megatron-Bridge runs it, and the differences."""
    strategy = run.strategy
    kind = _kind(strategy)
    back: dict[str, object] = {
        "kind": kind,
        "micro_batch": strategy.micro_batch,
        "accumulate": strategy.accumulate,
        "tensor": strategy.tensor,
        "sequence_parallel": strategy.sequence_parallel,
        "context": strategy.context,
        "context_method": strategy.context_method,
        "expert": strategy.expert,
        "dispatch": strategy.dispatch,
        "recompute": "none" if strategy.recompute == "selective" else strategy.recompute,
        "param_dtype": strategy.param_dtype if _is_mixed(strategy) else "fp32",
        "reduce_dtype": "bf16" if strategy.reduce_dtype == "bf16" else "fp32",
        # Megatron's FSDP reduces in every micro-batch; without FSDP only the last one reduces.
        "grad_sync": "every" if kind in _SHARDED else "last",
        "prefetch": strategy.prefetch,
    }
    if kind in ("zero2", "zero3"):
        back["reshard_after_backward"] = kind == "zero3"
    return compare(run, back, RULES)


def _kind(strategy: Strategy) -> str:
    """The kind that Megatron runs: ZeRO-3 that keeps parameters gathered is ZeRO-2."""
    if strategy.kind == "zero3" and strategy.reshard_after_forward is False:
        return "zero2"
    return strategy.kind


def _is_mixed(strategy: Strategy) -> bool:
    """Whether the run computes in bf16 or fp16 over fp32 master weights."""
    return strategy.param_dtype in ("bf16", "fp16") and strategy.master_dtype == "fp32"


def _written(run: RunSpec, train: TrainSettings, data: DataSettings) -> str:
    """The text of the script."""
    strategy = run.strategy
    mixed = _is_mixed(strategy)
    parts = {
        "train": _call("TrainingConfig", _training(run, train)),
        "validation": _call("ValidationConfig", {"eval_interval": train.steps, "eval_iters": 0}),
        "optimizer": _call("OptimizerConfig", _optimizer(strategy, train)),
        "scheduler": _call("SchedulerConfig", _schedule(train)),
        "ddp": _call("DistributedDataParallelConfig", _ddp(strategy)),
        "dataset": _call("GPTDatasetConfig", _dataset(run, train)),
        "tokenizer": _call("TokenizerConfig", _tokenizer(run, data)),
        "checkpoint": _call("CheckpointConfig", _checkpoint(run, train)),
        "logger": _call("LoggerConfig", {"log_interval": train.log_every}),
        "rng": _call("RNGConfig", {"seed": train.seed}),
        "mixed_precision": _precision(strategy),
    }
    return _FILE.format(
        title=one_line(f"{run.model.name} on {run.cluster}: {run.strategy}"),
        torch="import torch\n" if mixed else "",
        precision=_PRECISION if mixed else "",
        model=_model(run),
        settings="".join(
            f"    model.{key} = {_literal(value)}\n" for key, value in _axes(run).items()
        ),
        parts="".join(f"        {name}={text},\n" for name, text in parts.items()),
    )


_PRECISION = "from megatron.bridge.training.mixed_precision import MixedPrecisionConfig\n"
_FILE = """\
# For Megatron-Bridge: {title}

{torch}from megatron.bridge import AutoBridge
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    GPTDatasetConfig,
    LoggerConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.gpt_step import forward_step
{precision}from megatron.bridge.training.pretrain import pretrain
from transformers import AutoConfig


def run() -> ConfigContainer:
    config = {model}
    model = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
{settings}
    return ConfigContainer(
        model=model,
{parts}    )


if __name__ == "__main__":
    pretrain(run(), forward_step)
"""


def _call(name: str, arguments: dict[str, Any]) -> str:
    """The code of a call of `name` with keyword arguments, one per line."""
    lines = "".join(f"            {key}={_literal(value)},\n" for key, value in arguments.items())
    return f"{name}(\n{lines}        )"


def _literal(value: object) -> str:
    """A value as Python code."""
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return quoted(value) if isinstance(value, str) else repr(value)


def _model(run: RunSpec) -> str:
    """The code that builds the model's configuration with transformers."""
    model = run.model
    assert isinstance(model, ModelSpec)
    if model.config is not None:
        return f"AutoConfig.from_pretrained({_literal(str(config_folder(model.config)))})"
    config = {**to_config(model), "architectures": [_CLASSES[model.family]]}
    kept = {key: value for key, value in config.items() if value is not None}
    lines = "".join(f"        {key}={_literal(value)},\n" for key, value in kept.items())
    return f"AutoConfig.for_model(\n{lines}    )"


def _axes(run: RunSpec) -> dict[str, Any]:
    """Settings of the model: sequence length, degrees, recompute."""
    strategy = run.strategy
    found: dict[str, Any] = {
        "seq_length": run.job.seq_len,
        "tensor_model_parallel_size": strategy.tensor,
        "sequence_parallel": strategy.tensor > 1 and strategy.sequence_parallel,
        "context_parallel_size": strategy.context,
        "pipeline_model_parallel_size": 1,
        **_recompute(run),
    }
    if strategy.context > 1:
        found["cp_comm_type"] = _CONTEXT[strategy.context_method]
    if strategy.expert > 1:
        found |= {
            "expert_model_parallel_size": strategy.expert,
            **megatron_dispatcher(run),
        }
    return {**found, **megatron_balance(run)}


def _recompute(run: RunSpec) -> dict[str, Any]:
    """Settings of activation recomputation."""
    share, model = run.strategy.full_recompute_share, run.model
    if not share or not isinstance(model, ModelSpec):
        return {"recompute_granularity": None}
    blocks = int(blocks_of_share(share, model.layers))
    whole = blocks == model.layers
    return {
        "recompute_granularity": "full",
        # Layer by layer, or the first layers only.
        "recompute_method": "uniform" if whole else "block",
        "recompute_num_layers": 1 if whole else blocks,
    }


def _training(run: RunSpec, train: TrainSettings) -> dict[str, Any]:
    """Arguments of TrainingConfig: steps and batch sizes in sequences."""
    strategy = run.strategy
    return {
        "train_iters": train.steps,
        "micro_batch_size": strategy.micro_batch,
        "global_batch_size": strategy.micro_batch * strategy.accumulate * strategy.data_parallel,
    }


def _optimizer(strategy: Strategy, train: TrainSettings) -> dict[str, Any]:
    """Arguments of OptimizerConfig."""
    return {
        "optimizer": "adam",
        "lr": train.learning_rate,
        "min_lr": _final_rate(train),
        "weight_decay": train.weight_decay,
        "adam_beta1": train.beta1,
        "adam_beta2": train.beta2,
        "adam_eps": train.epsilon,
        "clip_grad": train.clip_norm,
        "use_distributed_optimizer": strategy.sharded,
    }


def _final_rate(train: TrainSettings) -> float:
    """The learning rate of the last step."""
    share = 1.0 if train.schedule == "constant" else train.final_learning_rate
    # Rounded, so that the product has no trailing digits of rounding error.
    return float(f"{train.learning_rate * share:.12g}")


def _schedule(train: TrainSettings) -> dict[str, Any]:
    """Arguments of SchedulerConfig."""
    return {
        "lr_decay_style": train.schedule,
        "lr_warmup_iters": train.warmup_steps,
        "lr_decay_iters": train.steps,
        "start_weight_decay": train.weight_decay,
        "end_weight_decay": train.weight_decay,
        "weight_decay_incr_style": "constant",
    }


def _ddp(strategy: Strategy) -> dict[str, Any]:
    """Arguments of DistributedDataParallelConfig."""
    fsdp = _SHARDED.get(_kind(strategy))
    return {
        "use_distributed_optimizer": strategy.sharded,
        "use_megatron_fsdp": fsdp is not None,
        "data_parallel_sharding_strategy": fsdp or "no_shard",
        "grad_reduce_in_fp32": strategy.reduce_dtype != "bf16",
        "overlap_grad_reduce": True,
        # Only a sharded optimizer leaves parameters that must be gathered.
        "overlap_param_gather": strategy.sharded,
    }


def _dataset(run: RunSpec, train: TrainSettings) -> dict[str, Any]:
    """Arguments of GPTDatasetConfig."""
    return {
        "random_seed": train.seed,
        "seq_length": run.job.seq_len,
        "reset_attention_mask": False,
        "reset_position_ids": False,
        "eod_mask_loss": False,
        # Synthetic tokens; put prefixes of .bin and .idx files here.
        "blend": None,
        "split": "100,0,0",
        "dataloader_type": "single",
    }


def _tokenizer(run: RunSpec, data: DataSettings) -> dict[str, Any]:
    """Arguments of TokenizerConfig."""
    if data.tokenizer == "bytes":
        vocab = getattr(run.model, "vocab", None)
        return {"tokenizer_type": "NullTokenizer", "vocab_size": vocab}
    folder = str(config_folder(data.tokenizer))
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": folder}


def _checkpoint(run: RunSpec, train: TrainSettings) -> dict[str, Any]:
    """Arguments of CheckpointConfig."""
    save = train.checkpoint
    fsdp = _kind(run.strategy) in _SHARDED
    found: dict[str, Any] = {
        "save": train.folder if save.save else None,
        "save_interval": save.every or SAVE_EVERY,
        # The only format that Megatron's FSDP has.
        "ckpt_format": "fsdp_dtensor" if fsdp else "torch_dist",
        "async_save": save.save and save.background and not fsdp,
    }
    if getattr(run.model, "pretrained", False):
        found["pretrained_checkpoint"] = str(config_folder(str(getattr(run.model, "config", ""))))
    return found


def _precision(strategy: Strategy) -> str:
    """The code of a MixedPrecisionConfig, or "None"."""
    if not _is_mixed(strategy):
        return "None"
    low = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[strategy.param_dtype]
    lines = (
        f"{strategy.param_dtype}=True",
        f"params_dtype={low}",
        f"pipeline_dtype={low}",
        "autocast_enabled=False",
        f"grad_reduce_in_fp32={strategy.reduce_dtype != 'bf16'}",
    )
    return "MixedPrecisionConfig(\n" + "".join(f"            {x},\n" for x in lines) + "        )"
