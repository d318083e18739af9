"""Detect files that train another objective than supervised fine-tuning, such as DPO.

Their settings are read, but Shardwise does not plan the memory and time of reference and reward
models, pairs of answers and sampled answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from shardwise.stacks.read.imported import Imported
from shardwise.stacks.read.source import Script

# Objectives by the prefix of TRL's class names.
_OF_CLASSES = {
    **{name: name for name in ("DPO", "OnlineDPO", "KTO", "ORPO", "CPO", "BCO", "XPO", "NashMD")},
    **{name: name for name in ("GRPO", "RLOO", "PPO", "GKD")},
    "Reward": "reward modelling",
    "PRM": "process reward modelling",
}
_CLASS = re.compile(rf"({'|'.join(_OF_CLASSES)})(?:Config|Trainer)")
# Objectives by a key that only their configurations have.
_OF_KEYS = {
    "precompute_ref_log_probs": "DPO",
    "reference_free": "DPO",
    "rpo_alpha": "DPO",
    "desirable_weight": "KTO",
    "num_generations": "GRPO",
    "reward_funcs": "GRPO",
    "num_ppo_epochs": "PPO",
    "center_rewards_coefficient": "reward modelling",
    "max_prompt_length": "preference optimisation",
    "beta": "preference optimisation",
}
CONFIGS = tuple(f"{name}Config" for name in _OF_CLASSES)


def objective_of_script(script: Script) -> str | None:
    """The objective of a script, such as "DPO"; None if it seems to be supervised."""
    found = (_CLASS.fullmatch(call) for call in script.called())
    return next((_OF_CLASSES[match[1]] for match in found if match), None)


def objective_of_table(table: Mapping[str, object]) -> str | None:
    """The objective of a TRL file, such as "DPO"; None if it seems to be supervised."""
    return next((_OF_KEYS[key] for key in _OF_KEYS if table.get(key) is not None), None)


def is_unplanned(found: Imported) -> bool:
    """Whether a file trains another objective than those that Shardwise plans."""
    return found.objective is not None and "method" not in found.job


def objective_warning(objective: str) -> str:
    """A warning that says what is not planned for this objective."""
    if objective == "GRPO":
        return (
            "GRPO is not supervised fine-tuning: generation and rewards are not planned; for the "
            'step of its trainer set method = "grpo" in [job], and generation_memory to what '
            'generation takes on each device, such as "24GiB"'
        )
    return (
        f"{objective} is not supervised fine-tuning: reference and reward models, pairs of answers "
        "and sampled answers are not planned, so predicted memory and time are too low; use the "
        "sharding and the batch only"
    )
