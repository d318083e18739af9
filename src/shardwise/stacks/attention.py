"""Attention kernels by the names of transformers, and by those of other stacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Attention
from shardwise.stacks.outcomes import repr_text
from shardwise.stacks.read.imported import Reading, boolean

KEY = "attn_implementation"
_NAMES: dict[Attention, str] = {
    "sdpa": "sdpa",
    "flash-2": "flash_attention_2",
    "flash-3": "flash_attention_3",
    "flex": "flex_attention",
    "eager": "eager",
}
# LLaMA-Factory's values of flash_attn; it has no flex attention.
FLASH_ATTN = "flash_attn"
_OF_LLAMA_FACTORY = {"sdpa": "sdpa", "flash-2": "fa2", "eager": "disabled"}
# axolotl's older switches.
_SWITCHES = {
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "flex_attention": "flex_attention",
    "eager_attention": "eager",
}


def attention_name(run: RunSpec, otherwise: str) -> str:
    """transformers' name of the run's attention kernel; `otherwise` if it names none."""
    attention = run.strategy.attention
    return otherwise if attention is None else _NAMES[attention]


def write_attention(run: RunSpec) -> dict[str, Any]:
    """The key of transformers for the run's attention kernel; empty if it names none."""
    return {} if run.strategy.attention is None else {KEY: attention_name(run, "")}


def write_flash_attn(run: RunSpec) -> dict[str, Any]:
    """LLaMA-Factory's key for the run's attention kernel; empty without one that it has."""
    name = _OF_LLAMA_FACTORY.get(run.strategy.attention or "")
    return {} if name is None else {FLASH_ATTN: name}


def read_attention(table: Mapping[str, object], reading: Reading) -> None:
    """Read transformers' name of an attention kernel, or one of axolotl's older switches."""
    switched = next((key for key in _SWITCHES if boolean(table, key, otherwise=False)), None)
    if table.get(KEY) is not None:
        _set(reading, KEY, table[KEY], {name: ours for ours, name in _NAMES.items()})
    elif switched is not None:
        names = {name: ours for ours, name in _NAMES.items()}
        _set(reading, switched, _SWITCHES[switched], names)


def read_flash_attn(table: Mapping[str, object], reading: Reading) -> None:
    """Read LLaMA-Factory's `flash_attn`; "auto" leaves the kernel to transformers."""
    if table.get(FLASH_ATTN) not in (None, "auto"):
        names = {name: ours for ours, name in _OF_LLAMA_FACTORY.items()}
        _set(reading, FLASH_ATTN, table[FLASH_ATTN], {**names, "fa3": "flash-3"})


def _set(reading: Reading, key: str, given: object, names: Mapping[str, str]) -> None:
    """Set the attention kernel called `given`, or report it as lost."""
    ours = names.get(str(given))
    if ours is None:
        reading.lose(key, f"{repr_text(given)} is planned as the kernel of the cluster's software")
    else:
        reading.given(key, {"attention": ours})
