"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli import complete
from shardwise.spec.optimizer import OPTIMIZERS
from shardwise.spec.precision import PRECISIONS
from shardwise.spec.states import STATES

RunFile = Annotated[Path, typer.Argument(help="The run.toml.", show_default=False)]
ProcessesOption = Annotated[
    int | None,
    typer.Option(
        "--nproc", min=1, help="Processes on this machine; default: the cluster's GPUs per node."
    ),
]
NameOption = Annotated[
    str | None,
    typer.Option("--name", help="Name of the run's folder; default: the file's name and the time."),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Hub name such as Qwen/Qwen3-8B, preset (shardwise catalog models), config.json "
        "or its folder, or a factory such as mymodels:make. Default: the run.toml's.",
        autocompletion=complete.models,
    ),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="4x8xH100-SXM@400Gbps (nodes x GPUs x device @ network per GPU), 4xp5.48xlarge, or "
        "a TOML file. Default: the run.toml's.",
        autocompletion=complete.clusters,
    ),
]
SeqLenOption = Annotated[
    str | None,
    typer.Option(
        "--seq-len",
        help="Sequence length in tokens. Default: 4096, or the model's maximum if shorter.",
    ),
]
GlobalBatchOption = Annotated[
    str | None,
    typer.Option(
        "--global-batch",
        help="Tokens per optimizer step over all devices, such as 4M. Default: no gradient "
        "accumulation.",
    ),
]
OptimizerOption = Annotated[
    str | None,
    typer.Option(
        "--optimizer",
        help="adamw, adam, adamw-8bit, adamw-4bit, adamw-fp8, adafactor, muon, momentum, sgd, or "
        "lion (planning only). Default: adamw.",
        autocompletion=complete.completer(*OPTIMIZERS),
    ),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        "--precision",
        help="bf16, fp16 or fp32 for compute and gathers; fp8, mxfp8 or nvfp4 for products of "
        "linear layers (planning only). Default: bf16.",
        autocompletion=complete.completer(*PRECISIONS),
    ),
]
StatesOption = Annotated[
    str | None,
    typer.Option(
        "--states",
        help="fp32, bf16 or bf16+stochastic (updates rounded at random). Default: fp32.",
        autocompletion=complete.completer(*STATES),
    ),
]
OffloadOption = Annotated[
    bool | None, typer.Option("--offload", help="Keep parameters and states on the CPU.")
]
OffloadOptimizerOption = Annotated[
    bool | None, typer.Option("--offload-optimizer", help="Keep only the optimizer there.")
]
OffloadActivationsOption = Annotated[
    bool | None, typer.Option("--offload-activations", help="Keep activations there.")
]
MeasuredOption = Annotated[
    list[str] | None,
    typer.Option(
        "--measured",
        help="How long a step of RUN took, such as 3.2s, or the folder of a measured run; may be "
        "repeated. Corrects the prediction.",
        show_default=False,
    ),
]
SoftwareOption = Annotated[
    str | None,
    typer.Option(
        "--software",
        help="Whose kernels are called, by a name of 'shardwise catalog software'. Default: "
        "torch-2.13; with --for, the stack's.",
        autocompletion=complete.software,
    ),
]
TokensOption = Annotated[
    str | None,
    typer.Option(
        "--tokens",
        help="Tokens to train on, such as 1T; adds the time and, with a price, the cost.",
    ),
]
PriceOption = Annotated[
    str | None,
    typer.Option(
        "--price",
        help="Price per GPU-hour: 2.5, or per device: H100-SXM=2.5,A100-80GB=1.6.",
    ),
]
DeadlineOption = Annotated[
    float | None,
    typer.Option("--deadline", help="Days by which all of --tokens must be trained."),
]
LossOption = Annotated[
    str | None,
    typer.Option(
        "--loss",
        help="plain; chunked: logits of one chunk of tokens at a time; or fused: a kernel of "
        "liger-kernel. Default: plain; 'plan' chooses.",
        autocompletion=complete.completer("plain", "chunked", "fused"),
    ),
]
AdapterOption = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        help="Train LoRA adapters only: lora:16, or lora:16:q_proj,v_proj; qlora:16 keeps the "
        "frozen weights in 4 bits. Default: none.",
        autocompletion=complete.completer("lora:16", "qlora:16", "dora:16"),
    ),
]
CompileOption = Annotated[
    bool | None,
    typer.Option("--compile", help="Compile each block with torch.compile."),
]
StackOption = Annotated[
    str | None,
    typer.Option(
        "--for",
        metavar="STACK",
        help="Search only what this stack of 'export --to' can run. Default: what Shardwise can.",
        autocompletion=complete.stacks,
    ),
]
