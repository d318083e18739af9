"""Runs to write for other stacks."""

from __future__ import annotations

import copy
from typing import Any

from shardwise.spec.run import RunSpec, run_from_dict

TINY: dict[str, Any] = {
    "cluster": "1x2xCPU",
    "model": {
        "name": "small",
        "family": "llama",
        "layers": 3,
        "hidden": 64,
        "heads": 4,
        "ffn": 96,
        "vocab": 256,
        "max_positions": 64,
    },
    "job": {"seq_len": 32, "global_batch": 256},
    "strategy": {"kind": "zero3", "micro_batch": 2, "param_dtype": "fp32"},
    "train": {"steps": 40, "learning_rate": 1e-2, "log_every": 1, "trackers": [], "measure": False},
}
# What would do harm where it is taken for more than text.
HOSTILE = (
    "x'\"; touch pwned; $(touch pwned) `touch pwned` \\\n#SBATCH --nodes=99\nkind: Pod\n"
    "---\n'''\n\"\"\"\nimport os; os.system('touch pwned') {x} %s \u2028 \x85 \U0001f600 &a *a !!x"
)
# A name is one line of what can be printed.
HOSTILE_NAME = "".join(one if one.isprintable() else " " for one in HOSTILE)


def tiny(**sections: Any) -> RunSpec:
    """A small run; tables given are laid over those of TINY."""
    data = copy.deepcopy(TINY)
    for name, section in sections.items():
        whole = not isinstance(section, dict) or not isinstance(data.get(name), dict)
        data[name] = section if whole else {**data[name], **section}
    return run_from_dict(data).resolved()


def large(**sections: Any) -> RunSpec:
    """A model of the catalogue on two nodes of eight GPUs."""
    data: dict[str, Any] = {
        "model": "llama-3-8b",
        "cluster": "2x8xH100-SXM@400Gbps",
        "job": {"seq_len": 8192},
        "strategy": {"kind": "zero3", "micro_batch": 1},
        "train": {"steps": 1000},
    }
    return run_from_dict({**data, **sections}).resolved()
