"""The software of a run: its kernels, and how it computes head and loss.

`catalogue/software.toml` holds the known ones. A cluster may name one; without a name it is the
software that `shardwise run` trains with.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Literal

from shardwise.spec.dispatch import ALL_TO_ALL, Dispatch
from shardwise.spec.record import Record, SpecError, did_you_mean
from shardwise.spec.tables import entry, sections

if TYPE_CHECKING:
    from shardwise.spec.cluster import DeviceSpec

# Generations of devices that run the same kernels.
Architecture = Literal["volta", "ampere", "ada", "hopper", "blackwell", "blackwell-pcie", "cdna"]
# How head and loss are computed: with logits cast to fp32 by PyTorch's kernels, with 16-bit logits,
# or in fp32 over chunks of the vocabulary.
Head = Literal["plain", "16-bit loss", "vocabulary chunks"]

DEFAULT = "torch-2.13"

_ARCHITECTURES: Mapping[str, Architecture] = {
    # Pascal and Turing run the same kernels: neither has bf16.
    **dict.fromkeys(("P100", "V100", "T4"), "volta"),
    **dict.fromkeys(("A100", "A800", "A10G", "A40", "A5000", "A6000"), "ampere"),
    **dict.fromkeys(("3060", "3080", "3090"), "ampere"),
    **dict.fromkeys(("L40S", "L4", "ADA", "4060", "4070", "4080", "4090"), "ada"),
    **dict.fromkeys(("H20", "H100", "H200", "H800", "GH200"), "hopper"),
    **dict.fromkeys(("B200", "GB200", "B300", "GB300"), "blackwell"),
    **dict.fromkeys(("5060", "5070", "5080", "5090", "PRO"), "blackwell-pcie"),
    **dict.fromkeys(("MI250X", "MI300A", "MI300X", "MI325X", "MI355X"), "cdna"),
}
# Unknown devices are treated as hopper above this dense half-precision peak, else as ampere.
_NEWER_PEAK = 500e12


# Stacks of `--for` with their own kernels or step times, and their software.
_STACKS = {"torchtitan": "torchtitan", "megatron-bridge": "megatron"}


class Software(Record):
    """The software of a stack; kernels have the names of `shardwise catalog kernels`."""

    name: str
    title: str
    # Year and month of the state described.
    date: str
    attention: Mapping[Architecture, str]
    head: Head = "plain"
    # How tokens travel to their experts; torch's all-to-all on other generations.
    dispatch: Mapping[Architecture, Dispatch] = {}
    # Bytes the allocator reserves per byte in its pools (from, to); None for the common interval.
    reserved_over_pools: tuple[float, float] | None = None
    # The stack whose fitted coefficients apply; empty if there are none.
    stack: str = ""

    def attention_on(self, device: DeviceSpec) -> str:
        """The name of the attention kernel that this software uses on a device."""
        return self.attention[architecture(device)]

    def dispatch_on(self, device: DeviceSpec) -> Dispatch:
        """How this software sends tokens to their experts on a device."""
        return self.dispatch.get(architecture(device), ALL_TO_ALL)


def architecture(device: DeviceSpec) -> Architecture:
    """The generation of a device, by its name; for an unknown name, by its peak."""
    parts = device.name.upper().split("-")
    known = next((_ARCHITECTURES[part] for part in parts if part in _ARCHITECTURES), None)
    if known is not None:
        return known
    peak = device.peak_flops("bf16") or device.peak_flops("fp16") or 0.0
    return "hopper" if peak >= _NEWER_PEAK else "ampere"


def is_known(device: DeviceSpec) -> bool:
    """Whether the generation of a device is known by its name."""
    return any(part in _ARCHITECTURES for part in device.name.upper().split("-"))


def software_of_stack(stack: str) -> str | None:
    """The name of the software of a stack of `--for`; None if it is the default."""
    return _STACKS.get(stack)


def software_names() -> list[str]:
    """The names of `shardwise catalog software`."""
    return list(sections("software.toml"))


@cache
def find_software(name: str | None = None) -> Software:
    """The software called `name` (case does not matter), by default that of the trainer.

    Raises SpecError if there is none.
    """
    folded = {known.lower(): known for known in software_names()}
    known = folded.get((name or DEFAULT).lower())
    if known is None:
        hint = did_you_mean(name or "", software_names()) or "; see 'shardwise catalog software'"
        raise SpecError(f"software: unknown software {(name or '')[:60]!r}{hint}")
    fields = entry("software.toml", known)
    return Software.read({"name": known, **fields}, where=f"software.toml: {known}")
