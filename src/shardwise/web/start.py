"""How to start a run: its file, what to set in it, what to install, and the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.launch.command import start_command
from shardwise.spec.lookup import write_cluster
from shardwise.spec.optimizer import LOW_BIT
from shardwise.spec.run import RunSpec, write_run

RUN_FILE = "run.toml"
_WEIGHTS = 'replace all keys of [model] with pretrained = "my-model"'
_FOLDER = "my-model is a folder with config.json, safetensors and a tokenizer."


def start_of(run: RunSpec | None) -> dict[str, Any]:
    """What a page needs to start a run, by name: file, commands, cluster; empty for None."""
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
    """Sentences: what to set in run.toml before a real run, as a page has no weights or data.

    Without them, a run trains random weights on synthetic tokens.
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
    """The pip command that installs what the run needs.

    transformers builds the model; adapters and low-bit optimizers need peft and torchao.
    """
    adapts = run.adapter is not None or run.job.optimizer in LOW_BIT
    return f'pip install "shardwise[{"adapters" if adapts else "hf"}]"'
