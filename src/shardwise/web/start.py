"""How to start a run: its file, what to set in it, what to install, and the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.api import start_command
from shardwise.spec.lookup import write_cluster
from shardwise.spec.optimizer import LOW_BIT
from shardwise.spec.run import RunSpec, write_run

RUN_FILE = "run.toml"
_WEIGHTS = 'replace all keys of [model] with pretrained = "my-model"'
_FOLDER = "my-model is a folder with config.json, safetensors and a tokenizer."


def start_of(run: RunSpec | None) -> dict[str, Any]:
    """What a page offers to run; nothing where no run fits."""
    if run is None:
        return {}
    return {
        "run": write_run(run),
        "before": before_words(run),
        "install": install_command(run),
        "start": start_command(run.cluster, Path(RUN_FILE)),
        "cluster": write_cluster(run.cluster),
        "strategy": run.strategy.model_dump(mode="json"),
    }


def before_words(run: RunSpec) -> str:
    """What to set before a real run: a page knows neither weights nor data.

    Both have defaults that train: random weights and synthetic tokens.
    """
    if run.adapter is not None:
        return (
            "As it is, run.toml adapts random weights to synthetic tokens. Before a real run, "
            f'{_WEIGHTS}, and add [data] with path = "chat.jsonl" and tokenizer = "my-model". '
            f"{_FOLDER}"
        )
    return (
        "As it is, run.toml trains random weights on synthetic tokens. Before a real run, add "
        f'[data] with path = "my-text" and tokenizer = "my-model"; to fine-tune, {_WEIGHTS}. '
        f"{_FOLDER}"
    )


def install_command(run: RunSpec) -> str:
    """Installs what trains the run: transformers builds it; adapters need peft and torchao."""
    adapts = run.adapter is not None or run.job.optimizer in LOW_BIT
    return f'pip install "shardwise[{"adapters" if adapts else "hf"}]"'
