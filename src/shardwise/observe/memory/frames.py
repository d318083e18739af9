"""Owner of an allocation from its stack: line of user code, and kind of memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardwise.observe.memory.allocator import Frame

_TORCH = re.compile(
    r"(^|/)(site|dist)-packages/(torch|triton|functorch)/|torchinductor"
    r"|(^|/)torch/(nn|optim|autograd|distributed|utils|cuda|_dynamo|_inductor|_functorch|_\w+\.py)"
)
# Only the parts of DTensor that move data: its dispatch wraps every operation of an optimizer.
_DISTRIBUTED = re.compile(
    r"(^|/)torch/distributed/(?!_?tensor/|checkpoint/)"
    r"|(^|/)torch/distributed/_?tensor/(_redistribute|_collective_utils)\.py"
)
_PARAMETERS_OF_FSDP = {"_init_sharded_param", "_move_states_to_device"}
_COLLECTIVE_NAMES = ("c10d::", "ProcessGroup", "ncclComm")
_OPTIM = re.compile(r"(^|/)torch/optim/|(^|/)optim(izers?)?/\w+\.py$")
_BACKWARD_NAMES = ("torch::autograd::Engine", "torch::autograd::generated::")
# Activation checkpointing recomputes a forward inside the backward.
_BACKWARD_FILES = re.compile(r"(^|/)torch/(_tensor|autograd/\w+|utils/checkpoint)\.py$")
_BACKWARD_FUNCTIONS = {"backward", "_engine_run_backward", "_make_grads", "grad", "unpack_hook",
                       "recompute_fn"}  # fmt: skip
_MODULES = re.compile(r"(^|/)torch/nn/(modules/\w+|functional|init|parameter)\.py$")
_BUILDING_FUNCTIONS = {
    *("__init__", "__new__", "_apply", "convert", "to_empty"),
    *("reset_parameters", "load_state_dict", "_load_from_state_dict"),
}
_LOADING_FUNCTIONS = {"from_pretrained", "_load_pretrained_model", "load_checkpoint_and_dispatch"}
_WRAPPERS = {"forward", "wrapper", "_call_impl", "fsdp_hook_wrapper"}
_LAUNCHERS = ("/elastic/", "/launcher/", "/run.py", "/checkpoint_wrapper.py")
_LOSS = re.compile(r"cross_entropy|CrossEntropy|log_softmax|LogSoftmax|nll_loss|NllLoss")
_NODE = re.compile(r"\b(\w+Backward\d*)(?=::|_)")


class Owner(NamedTuple):
    """The first frame outside torch, the kind of memory, and whether the loss allocated it.

    `file` and `line` are None if no such frame is known.
    """

    file: str | None
    line: int | None
    function: str
    category: str
    in_loss: bool


def owner_of(stack: Sequence[Frame]) -> Owner:
    """Owner of an allocation with this stack, whose innermost frame comes first."""
    category = category_of(stack)
    in_loss = any(_LOSS.search(frame.function) for frame in stack)
    mine = next((f for f in stack if is_python(f) and not _TORCH.search(f.file)), None)
    if mine is not None:
        return Owner(mine.file, mine.line or None, mine.function, category, in_loss)
    # Autograd threads have no Python frames: use the autograd node.
    node = next((m[1] for f in stack if (m := _NODE.search(f.function))), None)
    if node is not None:
        return Owner(None, None, f"{node} (autograd)", category, in_loss)
    inner = next((f for f in stack if is_python(f)), None)
    if inner is not None:
        return Owner(inner.file, inner.line or None, inner.function, category, in_loss)
    return Owner(None, None, "no Python frame", category, in_loss)


def is_python(frame: Frame) -> bool:
    return frame.file.endswith(".py") or frame.file.startswith("<")


def category_of(stack: Sequence[Frame]) -> str:
    """Kind of memory of an allocation, by its stack alone; the first rule that matches wins.

    A collective inside a backward is a collective. Gradients are recognised later, by lifetime.
    """
    for category, matches in _RULES:
        if matches(stack):
            return category
    return "unknown"


def _is_parameter_of_fsdp(stack: Sequence[Frame]) -> bool:
    return any(frame.function in _PARAMETERS_OF_FSDP for frame in stack)


def _is_collective(stack: Sequence[Frame]) -> bool:
    return any(
        _DISTRIBUTED.search(f.file) or any(word in f.function for word in _COLLECTIVE_NAMES)
        for f in stack
        if not _is_wrapper(f)
    )


def _is_optimizer(stack: Sequence[Frame]) -> bool:
    return any(_OPTIM.search(frame.file) for frame in stack)


def _is_backward(stack: Sequence[Frame]) -> bool:
    return any(
        f.function == "backward"
        or any(word in f.function for word in _BACKWARD_NAMES)
        or (f.function in _BACKWARD_FUNCTIONS and _BACKWARD_FILES.search(f.file))
        for f in stack
    )


def _is_building(stack: Sequence[Frame]) -> bool:
    """Whether the stack builds a module, moves it or loads its weights."""
    return any(
        f.function in _LOADING_FUNCTIONS
        or (f.function in _BUILDING_FUNCTIONS and _MODULES.search(f.file))
        for f in stack
    )


def _is_forward(stack: Sequence[Frame]) -> bool:
    return any(frame.function == "forward" or _MODULES.search(frame.file) for frame in stack)


_RULES: tuple[tuple[str, Callable[[Sequence[Frame]], bool]], ...] = (
    ("parameters", _is_parameter_of_fsdp),
    ("collectives", _is_collective),
    ("optimizer", _is_optimizer),
    ("backward", _is_backward),
    ("parameters", _is_building),
    ("forward", _is_forward),
)


def _is_wrapper(frame: Frame) -> bool:
    """Whether a frame only wraps user code: FSDP's hooks, torchrun's launcher."""
    in_distributed = "torch/distributed/" in frame.file
    return in_distributed and (
        frame.function in _WRAPPERS or any(part in frame.file for part in _LAUNCHERS)
    )
