"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwise.cli import complete

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Preset, config.json, model folder, or package.module:factory.",
        autocompletion=complete.models,
    ),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="Nodes x GPUs x device @ network per GPU: 4x8xH100-SXM@400Gbps; or a TOML file.",
        autocompletion=complete.clusters,
    ),
]
SeqLenOption = Annotated[
    str | None,
    typer.Option("--seq-len", help="Tokens per sequence; 4096, or what the model allows."),
]
GlobalBatchOption = Annotated[
    str | None,
    typer.Option("--global-batch", help="Tokens per step over all devices, such as 4M."),
]
OptimizerOption = Annotated[
    str | None,
    typer.Option(
        "--optimizer",
        help="adamw (default), adam, momentum, sgd; lion for planning only.",
        autocompletion=complete.words("adamw", "adam", "lion", "momentum", "sgd"),
    ),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        "--precision",
        help="bf16 (default), fp16 or fp32.",
        autocompletion=complete.words("bf16", "fp16", "fp32"),
    ),
]
TokensOption = Annotated[
    str | None,
    typer.Option("--tokens", help="Tokens to train on, such as 1T; adds time and cost."),
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
CompileOption = Annotated[
    bool | None, typer.Option("--compile", help="Blocks go through torch.compile.")
]
