"""Every private name of torch that Shardwise uses, each with its reason.

Torch may change these names in any release. Nothing else in Shardwise accesses one, so this is the
file to check for a new release. It imports no other module of Shardwise, and at the top only what
`import torch` loads.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

# Fake tensors: a module runs on them without data, as it would on its device. Tensors on the meta
# device take other paths, such as another attention.
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.autograd import profiler
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

# A dispatch mode sees every operation of a step. It is documented, but in a private module.
from torch.utils._python_dispatch import TorchDispatchMode

# All tensors in the nested arguments of an operation. Torch has no public module for it.
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from multiprocessing import synchronize

    from torch.distributed.elastic.agent.server.api import (
        RunResult,
        SimpleElasticAgent,
        WorkerGroup,
        WorkerSpec,
    )
    from torch.distributed.elastic.multiprocessing import LogsSpecs
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "DataDependentOutputException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "tree_leaves",
]

# ---- operations ----------------------------------------------------------------------------------

# Collectives as FSDP2, DDP and DTensor dispatch them: the operation, and the bytes of its message
# from its arguments. Torch has no public counter of collectives.
_C10D, _FUNCTIONAL = torch.ops.c10d, torch.ops._c10d_functional
ALL_GATHER, REDUCE_SCATTER = _C10D._allgather_base_.default, _C10D._reduce_scatter_base_.default
COLLECTIVES: dict[Any, tuple[str, Callable[[tuple[Any, ...]], int]]] = {
    ALL_GATHER: ("all_gather", lambda args: args[0].nbytes),
    REDUCE_SCATTER: ("reduce_scatter", lambda args: args[1].nbytes),
    _C10D.allreduce_.default: ("all_reduce", lambda args: args[0][0].nbytes),
    _C10D.broadcast_.default: ("broadcast", lambda args: args[0][0].nbytes),
    _C10D.alltoall_base_.default: ("all_to_all", lambda args: args[1].nbytes),
    # The arguments are the shard of one rank and the size of the group.
    _FUNCTIONAL.all_gather_into_tensor.default: (
        "all_gather",
        lambda args: args[0].nbytes * args[1],
    ),
    _FUNCTIONAL.reduce_scatter_tensor.default: ("reduce_scatter", lambda args: args[0].nbytes),
    _FUNCTIONAL.all_reduce.default: ("all_reduce", lambda args: args[0].nbytes),
    _FUNCTIONAL.all_to_all_single.default: ("all_to_all", lambda args: args[0].nbytes),
}
# Operations whose FLOPs and bytes the recorder counts. Their only names are those of aten.
CAST = torch.ops.aten._to_copy.default
SCALAR = torch.ops.aten._local_scalar_dense.default
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
GROUPED_MATMUL = torch.ops.aten._grouped_mm
# The fused attention of GPUs whose values may be narrower than its keys.
EFFICIENT_ATTENTION = torch.ops.aten._scaled_dot_product_efficient_attention
# A part of the names of all fused attention operations.
ATTENTION = "_scaled_dot_product"


def has_flex_attention(part: torch.nn.Module) -> bool:
    """Whether a model of transformers may run with flex attention; only this attribute tells."""
    return bool(getattr(part, "_supports_flex_attn", False))


def leave_profiler_out_of_selective_checkpoints() -> None:
    """Let selective checkpoints run any number of the profiler's marks when they recompute.

    A module inside a checkpoint that is an FSDP unit marks other moments in the recomputation than
    in the forward. Torch 2.13 takes them for operations of the model, and says that these differ.
    """
    from torch.utils.checkpoint import SAC_IGNORED_OPS

    profiler = torch.ops.profiler
    SAC_IGNORED_OPS.update(
        (
            profiler._record_function_enter_new.default,
            profiler._record_function_exit._RecordFunction,
        )
    )


def is_mutable(operation: Any) -> bool:
    """Whether an operation writes to one of its inputs; only its schema tells."""
    return bool(operation._schema.is_mutable)


def group_by_name(name: GroupName) -> dist.ProcessGroup:
    """The process group with this name: functional collectives pass only the name."""
    return _resolve_process_group(name)


def exchange(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send the n-th of `parts` to rank n (all-to-all); return the received parts by rank.

    The public all-to-all has no gradient.
    """
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    return all_to_all_single_autograd(parts, None, None, group)


def exchange_rows(
    rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send the next `sent[n]` rows to rank n (all-to-all); return `received[n]` rows of each."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    return all_to_all_single_autograd(rows, received, sent, group)


# ---- tensors and modules -------------------------------------------------------------------------

# Parts of parameter names that torch.compile, activation checkpointing and FSDP1 add.
WRAPPER_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def storage_id(storage: torch.UntypedStorage) -> int:
    """The identity of a storage while it is alive; FSDP changes its data pointer."""
    return int(storage._cdata)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; views share the count."""
    return int(tensor._version)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of a DTensor, any other tensor as it is; runs no operation.

    `to_local` would dispatch one, which a dispatch mode would see.
    """
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that hold the data of this rank, inside shards and tensor subclasses.

    A quantised tensor is a subclass without data of its own.
    """
    tensor = local_tensor(tensor)
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(tensor, name))
    else:
        yield tensor


@contextmanager
def with_plain_parameters(module: nn.Module) -> Iterator[None]:
    """Context in which a module's own DTensor parameters are their local tensors, with gradients.

    `fully_shard` gathers what is also divided along another mesh as a DTensor, and kernels that
    know no DTensors read attributes of the module. Torch has no public way to exchange these.
    """
    kept = dict(module._parameters)
    for name, parameter in kept.items():
        if parameter is not None and hasattr(parameter, "to_local"):
            module._parameters[name] = parameter.to_local()
    try:
        yield
    finally:
        module._parameters.update(kept)


def parameter_reset(module: nn.Module) -> Any:
    """The method that initialises a module, private in torch's own attention; None without one."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def is_profiling() -> bool:
    """Whether a profiler is recording. `record_function` takes microseconds even without one."""
    return profiler._is_profiler_enabled


# ---- FSDP2 ---------------------------------------------------------------------------------------
# `fully_shard` has no public way to read how a module was sharded.


def fsdp_groups(module: FSDPModule) -> list[Any]:
    """The FSDP parameter groups of a module: each is gathered when the module runs."""
    return list(module._get_fsdp_state()._fsdp_param_groups)


def gathered_into(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that FSDP gathers parameters into; it frees and refills their storages.

    In a group of one process it copies, and no collective shows them.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        for group in fsdp_groups(module) if isinstance(module, FSDPModule) else []:
            for parameter in group.fsdp_params:
                yield from parameter.all_gather_outputs


def chooses_reshard(module: FSDPModule) -> bool:
    """Whether reshard_after_forward was left to FSDP2, which decides in the first forward."""
    return bool(module._get_fsdp_state()._auto_reshard_after_forward)


def reshards_after_forward(group: Any) -> bool | int:
    """Whether a group reshards after forward.

    An integer is the number of ranks of the smaller group that it reshards to.
    """
    if not group._reshard_after_forward:
        return False
    if group._use_post_forward_mesh:
        return int(group.post_forward_mesh_info.shard_mesh_size)
    return True


def unsharded_parameter(parameter: Any) -> tuple[str, tuple[int, ...]]:
    """Name and full shape of a parameter of an FSDP group."""
    return parameter._param_fqn or "", tuple(parameter._orig_size)


# ---- DDP -----------------------------------------------------------------------------------------


def fix_buckets(model: DistributedDataParallel) -> None:
    """Make DDP form its final buckets now, in the reverse order of parameters.

    By itself DDP forms them again after the first backward of a process, so that a resumed process
    would begin with other buckets than the process before it had: with 3 or more ranks, the order
    in which a gradient is summed depends on its place in a bucket. Only the order in which
    gradients arrive decides, so empty gradients are passed in that order; all ranks must call this.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    model.reducer.prepare_for_backward([])
    for parameter in reversed(trained):
        torch.autograd.backward(parameter, torch.zeros_like(parameter))
    for parameter in trained:
        parameter.grad = None
    model.reducer._rebuild_buckets()


# ---- DTensor -------------------------------------------------------------------------------------


def silence_redistribution_advice() -> None:
    """Keep DTensor from advising to flatten meshes whenever it gathers over two axes.

    It does so in small reductions of norms only. Torch has no setting for it.
    """
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


# ---- torch elastic -------------------------------------------------------------------------------


class AgentHooks(Protocol):
    """Called by the elastic agent while it starts, polls and restarts the workers of a machine."""

    def before_rendezvous(self) -> None: ...

    def before_start(self) -> None: ...

    def after_start(self, processes: Iterable[int]) -> None: ...

    def waits_for_first_failure(self, codes: dict[int, int | None]) -> bool:
        """Whether the agent should not see a failure yet, given the exit code of each rank."""

    def all_healthy(self) -> None: ...

    def before_restart(self) -> None:
        """Raise an exception to end instead of restarting; the workers are stopped anyway."""


class UnblockedEvent:
    """A multiprocessing event whose `set` does not wait for processes that were killed.

    Torch lets workers that are done wait for this event. Its `set` waits until each of them has
    woken up: for ever, if one was killed while it waited.
    """

    def __init__(self, event: synchronize.Event) -> None:
        self._event = event

    def set(self) -> None:
        threading.Thread(target=self._event.set, daemon=True).start()


def elastic_agent(
    spec: WorkerSpec, logs: LogsSpecs, hooks: AgentHooks, start_method: str
) -> SimpleElasticAgent:
    """Torch's agent for local processes, which calls `hooks` and stops workers with SIGKILL.

    The methods to override are documented, but have private names.
    """
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    class Agent(LocalElasticAgent):
        def _rendezvous(self, worker_group: WorkerGroup) -> None:
            hooks.before_rendezvous()
            super()._rendezvous(worker_group)

        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            hooks.before_start()
            started: dict[int, Any] = super()._start_workers(worker_group)
            context: Any = self._pcontext
            context._worker_finished_event = UnblockedEvent(context._worker_finished_event)
            hooks.after_start(started.values())
            return started

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            context: Any = self._pcontext
            codes = [process.exitcode for process in context._pc.processes]
            ranks = [worker.global_rank for worker in worker_group.workers]
            if hooks.waits_for_first_failure(dict(zip(ranks, codes, strict=True))):
                return RunResult(state=WorkerState.HEALTHY)
            result: RunResult = super()._monitor_workers(worker_group)
            if result.state == WorkerState.HEALTHY:
                hooks.all_healthy()
            return result

        def _restart_workers(self, worker_group: WorkerGroup) -> None:
            try:
                hooks.before_restart()
            finally:
                self._stop_workers(worker_group)
            super()._restart_workers(worker_group)

        def _stop_workers(self, worker_group: WorkerGroup) -> None:
            # A rank that waits for a lost peer, or is stopped, responds to no other signal.
            self._shutdown(signal.SIGKILL)

        def _exit_barrier(self) -> None:
            """Nothing: hosts wait for each other when they leave the rendezvous."""

    return Agent(spec=spec, logs_specs=logs, start_method=start_method, exit_barrier_timeout=60)
