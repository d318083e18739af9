"""Replica groups that can be lost and rejoin: torchft manages the replicate axis.

Each group is a world of its own, whose mesh has the shard axis only. torchft decides before each
step which groups take part, brings groups that are behind up to date, and averages gradients over
the groups. If a group is lost during a step, the step is not committed and the others repeat it.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.engine.fresh_name import agree_on_name
from shardwise.engine.mesh import world
from shardwise.engine.rank_tree import shared_tree
from shardwise.pytorch.device import is_lost_peer
from shardwise.pytorch.store import new_store
from shardwise.spec.record import SpecError
from shardwise.spec.train import RestartSettings

# How often torchft repeats its request to the lighthouse within `join_s`.
_QUORUM_RETRIES = 1000
_HEARTBEAT = timedelta(milliseconds=100)


class Transport(Protocol):
    """Sends the state of this process to other groups and receives theirs; torchft calls it.

    `failure` is the last error of a transfer, or None.
    """

    failure: Exception | None


class HealingError(RuntimeError):
    """This group is behind the others, and their state did not reach every rank of it."""


class Replicas:
    """The connection of this rank to the same rank of the other replica groups.

    Ranks of the same number in different groups hold the same shards: torchft connects those.
    """

    def __init__(
        self,
        number: int,
        settings: RestartSettings,
        address: str,
        device: torch.device,
        transport: Transport,
        state: Callable[[], Mapping[str, torch.Tensor]],
        load: Callable[[Mapping[str, torch.Tensor]], None],
    ) -> None:
        _silence_torchft()
        from torchft import manager

        self._rank, self._size = world()
        self._device, self._transport = device, transport
        # The last error after which connections were closed.
        self._reported: Exception | None = None
        # Numbers of the groups in the current step, and whether they were connected for this step.
        self.present: tuple[int, ...] = ()
        self._is_new = False
        timeout = timedelta(seconds=settings.replica_timeout_s)
        # Groups that meet have just contacted the lighthouse, so a short timeout is enough.
        self._lost_after = timedelta(seconds=settings.lost_after_s)
        self._group = group = _process_group(device, timeout)
        group.configure = partial(self._configure, group.configure)
        store, store_host, store_port = self._shared_store(address)
        # Keep the store alive: the groups meet in the store of one of them.
        self._store = store
        with _listening_on(address):
            self._manager: Any = manager.Manager(
                pg=group,
                state_dict=state,
                load_state_dict=load,
                min_replica_size=settings.min_replicas,
                # A group that is behind is brought up to date first, then takes part in the step.
                use_async_quorum=False,
                # All groups start from the same seed or the same checkpoint.
                init_sync=False,
                timeout=timeout,
                quorum_timeout=timedelta(seconds=settings.join_s),
                connect_timeout=timedelta(seconds=settings.join_s),
                rank=self._rank,
                world_size=self._size,
                store_addr=store_host,
                store_port=store_port,
                lighthouse_addr=f"http://{settings.lighthouse}",
                replica_id=f"{number:05d}",
                hostname=address,
                heartbeat_interval=_HEARTBEAT,
                checkpoint_transport=transport,
                quorum_retries=_QUORUM_RETRIES,
            )

    def _shared_store(self, address: str) -> tuple[Any, str, int]:
        """(store, host, port) of this group's store; `store` is None except on rank 0."""
        store = new_store(address) if self._rank == 0 else None
        # Other ranks may be on other hosts.
        where = "" if store is None else f"{address} {store.port}"
        host, port = shared_tree().text_of(0, where).split()
        return store, host, int(port)

    def _configure(self, configure: Callable[..., None], *arguments: Any) -> None:
        """Connect the ranks of the groups that meet, under a name that was never used before.

        `configure` is torchft's own method, `arguments` are what torchft passes to it.
        """
        self._is_new = True
        address, replica, rank, size, *_, ranks = arguments
        # torchft counts ranks over all groups: these are the ranks of one number in each group.
        self.present = tuple(sorted(one // self._size for one in ranks))
        store = _store_client(address, self._lost_after)
        name = agree_on_name(store, rank, size, self._lost_after)
        configure(f"{address}/{name}", replica, rank, size, *arguments[4:])

    def start_at(self, step: int) -> None:
        """Set the number of completed steps."""
        self._manager.load_state_dict({"step": step, "batches_committed": 0})

    def average_gradients(self, model: nn.Module) -> None:
        """Make FSDP units average their gradients over the groups too, after their reduction."""
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.set_all_reduce_hook(self._average)

    def _average(self, gradients: torch.Tensor) -> None:
        """The all-reduce hook of FSDP: average gradients in place."""
        self._all_reduce(gradients)

    def _all_reduce(self, values: torch.Tensor, **settings: Any) -> bool:
        """All-reduce in place over the groups; return whether no group was lost in this step."""
        self._manager.allreduce(values, **settings).wait()
        error = self._manager.errored()
        if error is None:
            return True
        if error is self._reported:
            return False
        self._reported = error
        # The next rank in the ring waits for this rank, not for the lost one. Closing connections
        # ends its wait; references from the exception would keep them open.
        error.original_exception.__traceback__ = None
        self._group.abort()
        gc.collect()
        return False

    def wait_for_groups(self) -> bool:
        """Wait for the groups of the next step; load their state if this group is behind.

        Returns:
            Whether the groups were connected anew, which happens before any state is loaded. All
            ranks of a group return the same. Whether the state arrived may differ: torchft notes
            an error only, and the rank stays at its step.

        Raises:
            SpecError: The received state belongs to another run.
            HealingError: The state did not arrive. The group has to restart.
        """
        self._transport.failure, self._is_new = None, False
        self._manager.start_quorum()
        failure = self._transport.failure
        if isinstance(failure, SpecError):
            raise failure
        if failure is not None:
            raise HealingError(f"The state of another replica group did not arrive: {failure}")
        return self._is_new

    def sum(self, values: torch.Tensor) -> torch.Tensor | None:
        """The sum of integers over the groups, on the CPU; None if a group was lost."""
        summed = values.to(self._device)
        intact = self._all_reduce(summed, reduce_op=dist.ReduceOp.SUM)
        return summed.cpu() if intact else None

    @property
    def problem(self) -> str:
        """Why the current step cannot be committed; empty if it can."""
        error = self._manager.errored()
        if error is None:
            return ""
        cause = error.original_exception
        lost = is_lost_peer(cause)
        return "the connection to another group was lost" if lost else str(cause).splitlines()[0]

    def commit(self) -> bool:
        """Whether this step is committed: the gradients of all its groups arrived on every rank."""
        return bool(self._manager.should_commit())

    def close(self) -> None:
        """End the connection, without waiting for threads."""
        self._manager.shutdown(wait=False)


def _silence_torchft() -> None:
    """Silence torchft's logs: the trainer reports lost groups itself."""
    os.environ.setdefault("RUST_LOG", "error")
    logging.getLogger("torchft").setLevel(logging.CRITICAL)


def _store_client(address: str, timeout: timedelta) -> Any:
    """A client of the store at an address."""
    from torchft.process_group import create_store_client

    return create_store_client(address, timeout=timeout)


def _process_group(device: torch.device, timeout: timedelta) -> Any:
    """A torchft process group for the device: Gloo on CPUs, NCCL on GPUs."""
    from torchft import process_group

    kinds = {"cpu": "ProcessGroupGloo", "cuda": "ProcessGroupNCCL"}
    return getattr(process_group, kinds[device.type])(timeout=timeout)


@contextmanager
def _listening_on(address: str) -> Iterator[None]:
    """A context in which new torchft managers listen on one address only, at a free port.

    torchft has no setting for it: its manager listens on all interfaces.
    """
    from torchft import manager

    server = manager.ManagerServer
    host = f"[{address}]" if ":" in address else address

    def create(**settings: Any) -> Any:
        return server(**{**settings, "bind": f"{host}:0"})

    manager.ManagerServer = create
    try:
        yield
    finally:
        manager.ManagerServer = server
