"""Read the training recipe of torchtitan: steps, optimizer, schedule, clipping, seed and model.

A configuration in Python (from torchtitan 0.3 on) and one in TOML (up to 0.2) name them alike.
Defaults are those of torchtitan 0.3.0 and 0.2.2, which agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from shardwise.stacks.outcomes import repr_text
from shardwise.stacks.read.imported import Reading, finite_number, set_warmup
from shardwise.stacks.read.source import Call, unused_reason

SEQ_LEN, STEPS, WARMUP = 2048, 10_000, 200
# Presets by torchtitan's library and flavor of a model.
_PRESETS = {
    "llama3": {
        "1B": "llama-3.2-1b",
        "3B": "llama-3.2-3b",
        "8B": "llama-3.1-8b",
        "70B": "llama-3.1-70b",
        "405B": "llama-3.1-405b",
    },
    "qwen3": {
        size: f"qwen3-{size.lower()}"
        for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B")
    },
}


def set_model(library: str, flavor: object, reading: Reading) -> None:
    """Set the model from torchtitan's name of it, or report it as lost."""
    preset = _PRESETS.get(library, {}).get(str(flavor))
    if preset is not None:
        reading.given(f"flavor {library} {flavor}", {"model": preset})
    elif flavor is not None:
        reading.lose(
            "flavor", f"{repr_text(flavor)} of {library[:40]} is no preset; give the model"
        )


def set_lengths(table: Mapping[str, object], reading: Reading) -> None:
    """Set sequence length and steps from numbers that are given, or torchtitan's defaults."""
    for key, field, default in (
        ("seq_len", "job.seq_len", SEQ_LEN),
        ("steps", "train.steps", STEPS),
    ):
        value = table.get(key)
        if value is None:
            reading.default(key, {field: default})
        else:
            reading.given(key, {field: value})


def set_recipe(
    training: Mapping[str, object], schedule: Mapping[str, object], seed: object, reading: Reading
) -> None:
    """Set clipping, schedule, warm-up and seed; call it after the steps are set."""
    clip = training.get("max_norm", 1.0)
    infinite = isinstance(clip, Call) and clip.name == "float" and clip.args == ("inf",)
    if infinite or clip == math.inf:
        reading.train["clip_norm"] = 0.0
    elif isinstance(clip, (int, float)):
        reading.train["clip_norm"] = float(clip)
    else:
        reading.lose("max_norm", unused_reason(clip))
    _schedule(schedule, reading)
    warmup = schedule.get("warmup_steps", WARMUP)
    if isinstance(warmup, int) and not isinstance(warmup, bool) and warmup >= 0:
        set_warmup(reading, min(warmup, _steps(reading)))
    else:
        reading.lose("warmup_steps", unused_reason(warmup))
    if isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 2**63:
        reading.train["seed"] = seed


def _steps(reading: Reading) -> int:
    """The steps of the run, to which torchtitan limits the warm-up."""
    steps = reading.train.get("steps")
    return steps if isinstance(steps, int) else STEPS


def _schedule(table: Mapping[str, object], reading: Reading) -> None:
    """Set the schedule: linear or cosine from the warm-up to the end, or constant."""
    kind, ratio = table.get("decay_type", "linear"), table.get("decay_ratio")
    if ratio == 0:
        reading.given("decay_ratio", {"train.schedule": "constant"}, ratio, naming="pair")
        return
    if ratio is not None:
        reading.lose("decay_ratio", "the learning rate decays from the warm-up on in Shardwise")
    if kind not in ("linear", "cosine"):
        reading.lose("decay_type", f"{repr_text(kind)} is read as linear")
        kind = "linear"
    final = finite_number(table, "min_lr_factor", "lr_scheduler.") or 0.0
    fields = {"train.schedule": kind, "train.final_learning_rate": final}
    if "decay_type" in table:
        reading.given("decay_type", fields)
    else:
        reading.default("decay_type", fields)
