"""How tokens travel to the devices that have their experts, and back."""

from __future__ import annotations

from typing import Literal

# torch's all-to-all sends a token once for each of its experts. DeepEP and HybridEP send it once to
# each device, and between nodes once to each node, that has one of them.
Dispatch = Literal["all-to-all", "deepep", "hybridep"]
# What the trainer runs.
ALL_TO_ALL: Dispatch = "all-to-all"
