"""The command that asks the question of a page in a terminal."""

from __future__ import annotations

import shlex

from shardwise.spec.states import offload_option, parse_offload
from shardwise.web.question import Question

# In the order of the command's help.
_OPTIONS = (
    *(
        "model",
        "cluster",
        "seq_len",
        "global_batch",
        "optimizer",
        "adapter",
        "precision",
        "software",
    ),
    *("objective", "tokens", "price", "deadline", "loss", "states", "for_stack"),
)
_USUAL = {"objective": "throughput"}
_NAMES = {"for_stack": "for"}
_PASTED_FILES = {"model": "config.json", "cluster": "cluster.toml"}
# Options of quantities that sliders change; all other quantities are part of the cluster.
_MOVED = {"seq-len": "seq_len", "global-batch": "global_batch"}


def plan_command(question: Question) -> str:
    """The `shardwise plan` command line that asks the same question.

    Pasted text and a changed cluster appear as files: config.json and cluster.toml.
    """
    asked = question.model_dump(include=set(_OPTIONS), exclude_none=True)
    for name, file in _PASTED_FILES.items():
        if str(asked.get(name, "")).lstrip().startswith("{"):
            asked[name] = file
    for name, value in question.change.items():
        asked |= {_MOVED[name]: value} if name in _MOVED else {"cluster": _PASTED_FILES["cluster"]}
    words = ["shardwise", "plan"]
    for name in _OPTIONS:
        if name in asked and asked[name] != _USUAL.get(name):
            words += [f"--{_NAMES.get(name, name).replace('_', '-')}", _word(asked[name])]
    if question.exact_batch:
        words.append("--exact-batch")
    if question.low_precision_reduce:
        words.append("--allow-low-precision-reduce")
    words += offload_option(parse_offload(question.offload)).split()
    if question.compile:
        words.append("--compile")
    return shlex.join([*words, "-o", "run.toml"])


def _word(value: object) -> str:
    """An option value as a person writes it: floats without trailing zeros."""
    return f"{value:g}" if isinstance(value, float) else str(value)
