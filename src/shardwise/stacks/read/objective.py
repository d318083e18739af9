"""Objectives of fine-tuning other than supervised: their files are read, but not what they add.

Reference and reward models, pairs of answers and answers that are sampled take memory and time that
Shardwise does not plan.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from shardwise.stacks.read.source import Script

# Of TRL, by the beginning of its classes.
_OF_CLASSES = {
    **{name: name for name in ("DPO", "OnlineDPO", "KTO", "ORPO", "CPO", "BCO", "XPO", "NashMD")},
    **{name: name for name in ("GRPO", "RLOO", "PPO", "GKD")},
    "Reward": "reward modelling",
    "PRM": "process reward modelling",
}
_CLASS = re.compile(rf"({'|'.join(_OF_CLASSES)})(?:Config|Trainer)")
# By a key of a file that only they have.
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
    """What a script trains for; None where that is supervised, as far as it says."""
    found = (_CLASS.fullmatch(call) for call in script.called())
    return next((_OF_CLASSES[match[1]] for match in found if match), None)


def objective_of_table(table: Mapping[str, object]) -> str | None:
    """What a file of TRL trains for; None where that is supervised, as far as it says."""
    return next((_OF_KEYS[key] for key in _OF_KEYS if table.get(key) is not None), None)


def objective_warning(objective: str) -> str:
    """What is not planned of it."""
    return (
        f"{objective} is not supervised fine-tuning: reference and reward models, pairs of answers "
        "and sampled answers are not planned, so predicted memory and time are too low; use the "
        "sharding and the batch only"
    )
