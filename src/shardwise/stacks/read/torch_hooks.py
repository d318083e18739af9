"""Read the communication hook with which a script's DDP compresses gradients."""

from __future__ import annotations

from shardwise.stacks.read.imported import Reading
from shardwise.stacks.read.source import Call, Script, Symbol, unused_reason
from shardwise.stacks.read.torch_values import is_number

_HOOKS = {
    "bf16_compress_hook": "bf16",
    "fp16_compress_hook": "fp16",
    "powerSGD_hook": "powersgd",
}
# Arguments of PowerSGDState in their order, the field that each sets, and torch's default.
_STATE = (
    ("matrix_approximation_rank", "powersgd_rank", 1),
    ("start_powerSGD_iter", "powersgd_start", 1000),
)


def read_compression(script: Script, reading: Reading) -> None:
    """Read how DDP compresses gradients: the hook that is registered, and PowerSGD's settings."""
    hooks = [call.get("hook", 1) for call in script.calls("register_comm_hook")]
    for hook in hooks:
        compress = _HOOKS.get(hook.last) if isinstance(hook, Symbol) else None
        if compress is None:
            reading.lose("register_comm_hook", unused_reason(hook))
            continue
        reading.given("register_comm_hook", {"compress": compress})
        for state in script.calls("PowerSGDState") if compress == "powersgd" else ():
            _read_state(state, reading)


def _read_state(state: Call, reading: Reading) -> None:
    """Read the rank of PowerSGD and when it begins."""
    for place, (name, field, usual) in enumerate(_STATE, 1):
        value = state.get(name, place)
        if value is None:
            reading.default(name, {field: usual}, usual)
        elif is_number(value):
            reading.given(name, {field: value})
        else:
            reading.lose(name, unused_reason(value))
