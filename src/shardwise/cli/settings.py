"""The settings of a question, which several commands take as options.

Each is declared once: a keyword of `describe_run`, its option, help, completion, and how its text
is read. A command names those that it takes; `takes` gives it their options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, NamedTuple, get_type_hints

import typer

from shardwise.cli import complete
from shardwise.cli.values import flag_or_size, lowercase, number_or_word
from shardwise.spec.optimizer import OPTIMIZERS
from shardwise.spec.precision import PRECISIONS
from shardwise.spec.states import STATES, offload_of

# Flags of the keyword `offload`, by what each keeps in host memory.
_OFFLOADED = ("offload", "offload_optimizer", "offload_activations")


class Setting(NamedTuple):
    """A setting as an option; without it the keyword is None."""

    help: str
    # Of the option's value.
    type: Any = str
    # Values that a shell completes, or the function that lists them.
    completes: tuple[str, ...] | Callable[[str], list[str]] = ()
    # From the option's value to the keyword's.
    read: Callable[[Any], object] = lambda value: value

    def parameter(self, name: str) -> inspect.Parameter:
        """The parameter of a command, as typer reads it."""
        known = self.completes
        option = typer.Option(
            f"--{name.replace('_', '-')}",
            help=self.help,
            autocompletion=complete.completer(*known) if isinstance(known, tuple) else known,
            show_default=False,
        )
        return _keyword(name, Annotated[self.type | None, option], None)


# By keyword, in the order of --help.
SETTINGS: dict[str, Setting] = {
    "model": Setting(
        "Hub name such as Qwen/Qwen3-8B, preset (shardwise catalog models), config.json "
        "or its folder, or a factory such as mymodels:make. Default: the run.toml's.",
        completes=complete.models,
    ),
    "cluster": Setting(
        "4x8xH100-SXM@400Gbps (nodes x GPUs x device @ network per GPU), 4xp5.48xlarge, or "
        "a TOML file. Default: the run.toml's.",
        completes=complete.clusters,
    ),
    "strategy": Setting("single, ddp, zero1, zero2, zero3, hsdp, or zero3:8."),
    "seq_len": Setting(
        "Sequence length in tokens. Default: 4096, or the model's maximum if shorter."
    ),
    "micro_batch": Setting("Sequences per device at a time; 1.", int),
    "accumulate": Setting("Micro-batches per optimizer step; 1.", int),
    "shares": Setting("Micro-batches per step by part of an unequal cluster, such as 3,2."),
    "global_batch": Setting(
        "Tokens per optimizer step over all devices, such as 4M. Default: no gradient accumulation."
    ),
    "optimizer": Setting(
        "adamw, adam, adamw-8bit, adamw-4bit, adamw-fp8, adafactor, muon, momentum, sgd, or "
        "lion (planning only). Default: adamw.",
        completes=OPTIMIZERS,
        read=lowercase,
    ),
    "adapter": Setting(
        "Train LoRA adapters only: lora:16, or lora:16:q_proj,v_proj; qlora:16 keeps the "
        "frozen weights in 4 bits. Default: none.",
        completes=("lora:16", "qlora:16", "dora:16"),
    ),
    "precision": Setting(
        "bf16, fp16 or fp32 for compute and gathers; fp8, mxfp8 or nvfp4 for products of "
        "linear layers (planning only). Default: bf16.",
        completes=tuple(PRECISIONS),
        read=lowercase,
    ),
    "states": Setting(
        "fp32, bf16 or bf16+stochastic (updates rounded at random). Default: fp32.",
        completes=tuple(STATES),
        read=lowercase,
    ),
    "software": Setting(
        "Whose kernels are called, by a name of 'shardwise catalog software'. Default: "
        "torch-2.13; with --for, the stack's.",
        completes=complete.software,
        read=lowercase,
    ),
    "measured": Setting(
        "How long a step of RUN took, such as 3.2s, or the folder of a measured run; may be "
        "repeated. Corrects the prediction.",
        list[str],
        read=lambda values: values or (),
    ),
    "recompute": Setting(
        "none, selective, full, or a share of blocks such as 0.5.", read=number_or_word
    ),
    "grad_sync": Setting(
        "When gradients are reduced: every micro-batch, local (in groups at once) or "
        "last; last for ddp and zero1, else every.",
        read=lowercase,
    ),
    "reshard_after_forward": Setting(
        "true (zero3), false (the others), or a group size: gathered from fewer devices.",
        read=flag_or_size,
    ),
    "blocks_per_unit": Setting("Blocks in one fully_shard group; 1.", int),
    "prefetch": Setting("Units gathered ahead in the backward; 1.", int),
    "split_root": Setting("Embedding and head in fully_shard groups of their own.", bool),
    "loss": Setting(
        "plain; chunked: logits of one chunk of tokens at a time; or fused: a kernel of "
        "liger-kernel. Default: plain; 'plan' chooses.",
        completes=("plain", "chunked", "fused"),
        read=lowercase,
    ),
    "offload": Setting("Keep parameters and states on the CPU.", bool),
    "offload_optimizer": Setting("Keep only the optimizer there.", bool),
    "offload_activations": Setting("Keep activations there.", bool),
    "compile": Setting("Compile each block with torch.compile.", bool),
}


def takes(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that gives a command the options of the settings in `names`.

    They follow the command's first argument. The command gets their values as keywords of
    `describe_run`: as a parameter of that name if it has one, else among `**settings`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        shown = inspect.signature(command).parameters.values()
        first, *own = (
            _keyword(one.name, hints[one.name], one.default)
            for one in shown
            if one.kind is not one.VAR_KEYWORD and one.name not in names
        )
        settings = (SETTINGS[name].parameter(name) for name in names)

        @wraps(command)
        def asked(**given: Any) -> None:
            values: dict[str, Any] = {name: SETTINGS[name].read(given.pop(name)) for name in names}
            if "offload" in names:
                values["offload"] = offload_of(*(values.pop(name) for name in _OFFLOADED))
            command(**given, **values)

        parameters = [first, *settings, *own]
        asked.__annotations__ = {one.name: one.annotation for one in parameters}
        setattr(asked, "__signature__", inspect.Signature(parameters))  # noqa: B010
        return asked

    return decorate


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """A keyword parameter."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, annotation=annotation, default=default)
