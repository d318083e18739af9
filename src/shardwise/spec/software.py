"""The software of a run: which kernels it calls, how it computes the head, what its host costs.

`catalogue/software.toml` holds what is known. A cluster may name one; without a name it is the
software that `shardwise run` trains with.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Literal

from shardwise.spec import catalogue
from shardwise.spec.cluster import DeviceSpec
from shardwise.spec.record import Record, SpecError, did_you_mean

# Generations of devices that run the same kernels.
Architecture = Literal["volta", "ampere", "ada", "hopper", "blackwell", "blackwell-pcie", "cdna"]
# Of the head and its loss: logits cast to fp32 in the kernels of PyTorch, the loss of 16-bit
# logits as they are, or fp32 over parts of the vocabulary.
Head = Literal["plain", "16-bit loss", "vocabulary chunks"]

DEFAULT = "torch-2.13"

_ARCHITECTURES: Mapping[str, Architecture] = {
    **dict.fromkeys(("V100", "T4"), "volta"),
    **dict.fromkeys(("A100", "A800", "A10G", "A6000", "3090"), "ampere"),
    **dict.fromkeys(("L40S", "L4", "4090"), "ada"),
    **dict.fromkeys(("H100", "H200", "H800", "GH200"), "hopper"),
    **dict.fromkeys(("B200", "GB200", "B300", "GB300"), "blackwell"),
    **dict.fromkeys(("5090", "PRO"), "blackwell-pcie"),
    **dict.fromkeys(("MI250X", "MI300X", "MI325X", "MI355X"), "cdna"),
}
# Others are taken for relatives of the one or the other, by their dense half-precision peak.
_NEWER_PEAK = 500e12


# Stacks of `--for` with kernels or steps of their own.
_STACKS = {"torchtitan": "torchtitan", "megatron-bridge": "megatron"}


class Software(Record):
    """What a stack runs; kernels by the names of `shardwise catalog kernels`."""

    name: str
    title: str
    # When it was so: a year and a month.
    date: str
    attention: Mapping[Architecture, str]
    head: Head = "plain"
    # Bytes its allocator reserves per byte that its streams' pools need, from and to, where runs of
    # it show another share than other stacks.
    reserved_over_pools: tuple[float, float] | None = None
    # The stack whose runs say how its steps differ from what kernels give; empty where none do.
    stack: str = ""

    def attention_on(self, device: DeviceSpec) -> str:
        """The name of its attention kernel on a device."""
        return self.attention[architecture(device)]


def architecture(device: DeviceSpec) -> Architecture:
    """Its generation; that of the nearest peak where it is not known."""
    parts = device.name.upper().split("-")
    known = next((_ARCHITECTURES[part] for part in parts if part in _ARCHITECTURES), None)
    if known is not None:
        return known
    peak = device.peak_flops("bf16") or device.peak_flops("fp16") or 0.0
    return "hopper" if peak >= _NEWER_PEAK else "ampere"


def is_known(device: DeviceSpec) -> bool:
    """Whether its generation is known by its name."""
    return any(part in _ARCHITECTURES for part in device.name.upper().split("-"))


def software_of_stack(stack: str) -> str | None:
    """The software that a stack of `--for` runs, where that is not PyTorch's own kernels."""
    return _STACKS.get(stack)


@cache
def find_software(name: str | None = None) -> Software:
    """The software called `name` (case does not matter); without one, the default."""
    folded = {known.lower(): known for known in catalogue.software_names()}
    known = folded.get((name or DEFAULT).lower())
    if known is None:
        hint = did_you_mean(name or "", catalogue.software_names()) or (
            "; see 'shardwise catalog software'"
        )
        raise SpecError(f"software: unknown software {(name or '')[:60]!r}{hint}")
    entry = catalogue.software_entry(known)
    return Software.read({"name": known, **entry}, where=f"software.toml: {known}")
