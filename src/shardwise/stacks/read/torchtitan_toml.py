"""Read a torchtitan TOML, as releases up to 0.2 are configured. Defaults are those of 0.2.2."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.spec.record import SpecError
from shardwise.stacks.experts import set_dispatch
from shardwise.stacks.outcomes import repr_text
from shardwise.stacks.read.imported import (
    Imported,
    Reading,
    boolean,
    finite_number,
    list_unknown,
    set_optimizer,
    subtable,
)
from shardwise.stacks.read.source import Call
from shardwise.stacks.read.titan_recipe import set_lengths, set_model, set_recipe
from shardwise.stacks.read.torchtitan import OPTIMIZERS, read_experts, read_layout, read_training

VERSION = "0.2.2"
_SECTIONS = ("training", "parallelism", "activation_checkpoint", "lr_scheduler")
_FLOAT8, _MX = "quantize.linear.float8", "quantize.linear.mx"
# Keys by section: read, or without effect on a plan. Other sections have none of the former.
KNOWN: dict[str, tuple[str, ...]] = {
    "model": ("name", "flavor", "hf_assets_path", "tokenizer_path", "converters",
              "print_after_conversion"),
    "optimizer": ("name", "lr", "beta1", "beta2", "eps", "weight_decay", "implementation",
                  "early_step_in_backward"),
    "lr_scheduler": ("warmup_steps", "total_steps", "decay_ratio", "decay_type", "min_lr_factor"),
    "training": ("dataset", "dataset_path", "local_batch_size", "global_batch_size", "seq_len",
                 "max_norm", "steps", "enable_cpu_offload", "dtype", "mixed_precision_param",
                 "mixed_precision_reduce", "gc_freq", "gc_debug", "dataloader"),
    "parallelism": ("data_parallel_replicate_degree", "data_parallel_shard_degree",
                    "fsdp_reshard_after_forward", "tensor_parallel_degree",
                    "disable_loss_parallel", "enable_async_tensor_parallel",
                    "pipeline_parallel_degree", "module_fqns_per_model_part",
                    "pipeline_parallel_first_stage_less_layers",
                    "pipeline_parallel_last_stage_less_layers",
                    "pipeline_parallel_layers_per_stage", "pipeline_parallel_schedule",
                    "pipeline_parallel_schedule_csv", "pipeline_parallel_microbatch_size",
                    "pipeline_parallel_expert_parallel_overlap", "context_parallel_degree",
                    "context_parallel_load_balancer", "context_parallel_rotate_method",
                    "expert_parallel_degree", "expert_tensor_parallel_degree",
                    "expert_parallel_comm_backend"),
    "activation_checkpoint": ("mode", "selective_ac_option",
                              "per_op_sac_force_recompute_mm_shapes_by_fqns", "early_stop",
                              "memory_budget", "visualize_memory_budget_pareto",
                              "preserve_rng_state", "determinism_check", "debug"),
    "compile": ("enable", "components", "backend"),
    "quantize": ("linear", "grouped_mm"),
    "debug": ("seed", "deterministic", "deterministic_warn_only", "moe_force_load_balance"),
}  # fmt: skip
# Sections about what is printed, saved, checked and how processes meet.
_OTHERS = ("job", "profiling", "metrics", "checkpoint", "comm", "memory_estimation",
           "fault_tolerance", "experimental", "validation")  # fmt: skip
# Keys of older releases, and their names in 0.2.2.
_OLDER = {"training": {"batch_size": "local_batch_size"}, "lr_scheduler": {"lr_min":
          "min_lr_factor"}}  # fmt: skip


def is_torchtitan(table: Mapping[str, object]) -> bool:
    """Whether a TOML configures torchtitan."""
    return any(isinstance(table.get(name), dict) for name in _SECTIONS)


def read(table: Mapping[str, object]) -> Imported:
    """The settings of a torchtitan TOML."""
    reading = Reading("a torchtitan TOML")
    list_unknown(reading, table, (*KNOWN, *_OTHERS))
    parts = {name: _part(table, name, reading) for name in KNOWN}
    model, training = parts["model"], parts["training"]
    parallelism = Call("ParallelismConfig", (), parts["parallelism"])
    read_layout(parallelism, reading)
    # Loss parallelism, and sequence parallelism beside tensor parallelism, are always on.
    read_training(Call("TrainingConfig", (), training), reading)
    read_experts(parallelism, reading)
    backend = "expert_parallel_comm_backend"
    set_dispatch(reading, backend, parallelism.get(backend))
    set_lengths(training, reading)
    _optimizer(parts["optimizer"], reading)
    set_recipe(training, parts["lr_scheduler"], parts["debug"].get("seed"), reading)
    _recompute(parts["activation_checkpoint"], reading)
    _compile(parts["compile"], reading)
    _converters(model, parts["quantize"], reading)
    if boolean(parts["debug"], "moe_force_load_balance", otherwise=False):
        reading.lose("moe_force_load_balance", "routers choose experts in Shardwise")
    set_model(str(model.get("name", "llama3")), model.get("flavor", "debugmodel"), reading)
    reading.remark(f"What the file leaves out has the defaults of torchtitan {VERSION}.")
    return reading.finish()


def _part(table: Mapping[str, object], name: str, reading: Reading) -> dict[str, object]:
    """One section with today's names of its keys; keys that are unknown are reported."""
    older = _OLDER.get(name, {})
    found = {older.get(key, key): value for key, value in subtable(table, name).items()}
    list_unknown(reading, found, KNOWN[name], f"{name}.")
    return found


def _optimizer(table: Mapping[str, object], reading: Reading) -> None:
    """Read the optimizer with its learning rate, betas, epsilon and weight decay."""
    name = table.get("name", "AdamW")
    if name in OPTIMIZERS:
        key = "optimizer.name"
        fields = {"job.optimizer": OPTIMIZERS[str(name)]}
        (reading.given if "name" in table else reading.default)(key, fields)
    else:
        reading.lose("optimizer.name", f"{repr_text(name)} has no counterpart; set job.optimizer")
    defaults = {"lr": 8e-4, "weight_decay": 0.1, "eps": 1e-8, "beta1": 0.9, "beta2": 0.95}

    def number(key: str) -> float:
        given = finite_number(table, key, "optimizer.")
        return defaults[key] if given is None else given

    set_optimizer(reading, number, (number("beta1"), number("beta2")))
    if boolean(table, "early_step_in_backward", otherwise=False):
        reading.lose("early_step_in_backward", "Shardwise steps after the backward")


def _recompute(table: Mapping[str, object], reading: Reading) -> None:
    """Read activation checkpointing: none, full, by operation, or full in every n-th block."""
    mode, option = table.get("mode", "selective"), str(table.get("selective_ac_option", "2"))
    by_layer = mode == "selective" and option.isdigit() and int(option[:6]) > 0
    if by_layer:
        every = int(option[:6])
        share: object = "full" if every == 1 else 1 / every
        where = f": every {every}th block there, the same share of blocks from the first on here"
        why = "" if every == 1 else where
        _settled(table, "selective_ac_option", {"recompute": share}, why, reading)
    elif mode in ("none", "full", "selective"):
        _settled(table, "mode", {"recompute": mode}, "", reading)
    else:
        reading.lose("mode", f"{repr_text(mode)} of activation_checkpoint is read as selective")
        reading.strategy["recompute"] = "selective"


def _settled(
    table: Mapping[str, object], key: str, fields: dict[str, object], why: str, reading: Reading
) -> None:
    """Set fields from a key that is given, or from its default."""
    name = f"activation_checkpoint.{key}"
    (reading.given if key in table else reading.default)(name, fields, why=why)


def _compile(table: Mapping[str, object], reading: Reading) -> None:
    """Read whether the model is compiled."""
    components = table.get("components", ["model", "loss"])
    if not isinstance(components, list):
        raise SpecError(f"compile.components: must be a list, not {repr_text(components)}")
    on = boolean(table, "enable", otherwise=False, where="compile.")
    reading.strategy["compile"] = on and "model" in components


def _converters(
    model: Mapping[str, object], quantize: Mapping[str, object], reading: Reading
) -> None:
    """Read matrix products in low bits, which `model.converters` turns on."""
    names = model.get("converters") or []
    linear = subtable(quantize, "linear")
    for name in names if isinstance(names, list) else [names]:
        if name in (_FLOAT8, "float8"):
            float8 = subtable(linear, "float8")
            reading.given(str(name), {"linear_dtype": "fp8"})
            gathers = boolean(float8, "enable_fsdp_float8_all_gather", otherwise=False)
            if gathers and reading.strategy["kind"] not in ("ddp", "single"):
                reading.given("enable_fsdp_float8_all_gather", {"low_bit_gather": True})
        elif name in (_MX, "mx"):
            reading.given(str(name), {"linear_dtype": "mxfp8"})
        else:
            reading.lose("converters", f"{repr_text(name)} has no counterpart")
