"""Check a run before it starts: train a reduced model on a few CPU processes.

The processes use the run's own strategy and are compared with one process that trains on the same
batch. The same code shards the full model, so the results apply to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.engine.adapter import stored_bytes
from shardwise.engine.counter import CollectiveCounter
from shardwise.engine.loss import loss_of
from shardwise.engine.materialize import Materializer
from shardwise.engine.mesh import join, world
from shardwise.engine.parallelize import parallelize
from shardwise.engine.sync import is_parallel, micro_batch, strategy_of
from shardwise.engine.wrapped import axes_of
from shardwise.predict.api import estimate_run
from shardwise.pytorch.blocks import find_blocks, parameter_names
from shardwise.pytorch.build import build_module, with_exact_experts
from shardwise.spec.catalogue import this_machine
from shardwise.spec.compression import FIRST_START
from shardwise.spec.lookup import Model
from shardwise.spec.mesh import Mesh
from shardwise.spec.model import ModelSpec
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.spec.train import DataSettings, TrainSettings
from shardwise.step.profile import StepProfile, by_operation
from shardwise.trainer.agree import Agreement
from shardwise.trainer.clip import clip_gradients
from shardwise.trainer.data.batches import Layout, MicroBatch, SyntheticBatches, make_batches
from shardwise.trainer.optimizer import make_optimizer
from shardwise.trainer.start import layout_of, vocabulary
from shardwise.trials.doctor.adapter_checks import adapter_checks, with_base
from shardwise.trials.doctor.check import Check, traffic_difference
from shardwise.trials.doctor.expert_checks import expert_checks
from shardwise.units.module import TORCH_DTYPES

# A module that cannot be reduced is checked as it is, up to this many parameters.
MAX_UNREDUCED_PARAMETERS = 50_000_000
_SEQ_LEN = 32
_EXACT = 1e-9


def processes_for(run: RunSpec) -> int:
    """The number of CPU processes for the checks: 2 along each axis of the run's strategy."""
    strategy = run.strategy.resolve(run.cluster.devices, run.cluster.devices_per_node)
    return 1 if strategy.kind == "single" else Mesh(**_reduced_degrees(strategy)).devices


def _reduced_degrees(strategy: Strategy) -> dict[str, int]:
    """The degree of each axis in the checks: 2 along each axis that the resolved strategy uses.

    Parameters get 4 shards if they are resharded to a part of their group. A strategy of one device
    is checked with two.
    """
    degrees = {axis: min(degree, 2) for axis, degree in strategy.mesh._asdict().items()}
    if type(strategy.reshard_after_forward) is int:
        degrees["shard"] = 4 // degrees["context"]
    if Mesh(**degrees).devices == 1:
        degrees["shard" if strategy.sharded else "replicate"] = 2
    return degrees


def _reduced_experts(strategy: Strategy, degrees: dict[str, int]) -> int:
    """The degree of expert parallelism in the checks, where each axis has the given degree."""
    return min(strategy.expert, degrees["shard"] * degrees["context"])


def miniature(run: RunSpec) -> RunSpec | None:
    """The run with a reduced model on this machine's CPUs; None if it cannot be reduced."""
    processes = processes_for(run)
    full = run.strategy.resolve(run.cluster.devices, run.cluster.devices_per_node)
    full = run.job.split(full)
    degrees: dict[str, Any] = _reduced_degrees(full)
    degrees["expert"] = _reduced_experts(full, degrees)
    if type(full.reshard_after_forward) is int:
        degrees["reshard_after_forward"] = 2
    if full.loss == "fused":
        # Its kernels run on GPUs only. A chunked loss has the same gradients at the same moments.
        degrees["loss"] = "chunked"
    # The third step is checked.
    degrees["powersgd_start"] = FIRST_START
    strategy = full.but(micro_batch=2, accumulate=min(full.accumulate, 2), **degrees)
    model = reduced(run.model, full)
    if model is None:
        return None
    cluster = run.cluster.but(device=this_machine(processes), nodes=1, devices_per_node=processes)
    job = run.job.but(seq_len=_SEQ_LEN, global_batch=None)
    return RunSpec(model, cluster, job, strategy, run.train, run.data).resolved()


def reduced(model: Model, strategy: Strategy) -> Model | None:
    """A model of the same family with a few small blocks.

    A model that is no ModelSpec stays as it is; None if it has too many parameters for that.
    """
    if not isinstance(model, ModelSpec):
        with torch.device("meta"):
            size = sum(p.numel() for p in build_module(model).parameters())
        return model if size <= MAX_UNREDUCED_PARAMETERS else None
    heads = min(model.heads, 4)
    groups = max(1, model.heads // model.kv_heads)
    sizes: dict[str, Any] = {
        "layers": min(model.layers, max(3, strategy.blocks_per_unit + 1)),
        "heads": heads,
        "kv_heads": max(min(strategy.tensor, 2), heads // groups),
        "head_dim": 16,
        "hidden": heads * 16,
        "ffn": 96,
        "vocab": min(model.vocab, 503),
        "max_positions": 64,
        "config": None,
        "pretrained": False,
    }
    if model.adapter is not None and model.adapter.quantised:
        # Each rank holds full blocks of NF4's scales.
        sizes |= {"head_dim": 128, "hidden": heads * 128, "ffn": 256}
    if model.experts is not None:
        sizes["experts"] = min(model.experts, 4)
        sizes["experts_per_token"] = min(model.experts_per_token or 1, 2)
    if model.window is not None:
        sizes["window"] = 16
    return model.but(**sizes)


def check_running(run: RunSpec, mini: RunSpec) -> list[Check]:
    """Run the checks that need processes; all ranks call this and return the same list."""
    join(torch.device("cpu"))
    torch.set_num_threads(1)
    checks = list(_adapters(mini))
    # Without gradients there is no step to check.
    if all(check.passed for check in checks):
        checks += [
            *_check_with_own_dtypes(mini),
            _same_as_one_process(mini),
            _equal_counts(run, mini),
        ]
    return _agreed(checks)


def check_sharding(run: RunSpec, sharding: str) -> list[Check]:
    """Check a mixture of experts that the function `sharding` shards; all ranks call this."""
    join(torch.device("cpu"))
    torch.set_num_threads(1)
    model = reduced(run.model, run.strategy)
    if model is None:
        return [Check("sharding", None, "the module is too large to check on CPUs")]
    return _agreed(expert_checks(model, sharding))


def _agreed(checks: list[Check]) -> list[Check]:
    """The checks, of which those that fail on any rank have failed."""
    failures = torch.tensor([1 if check.passed is False else 0 for check in checks])
    if world()[1] > 1:
        dist.all_reduce(failures)
    return [
        check._replace(
            passed=False if failed else check.passed,
            detail=check.detail
            if not failed or not check.passed
            else f"{check.detail}, but another rank failed",
        )
        for check, failed in zip(checks, failures.tolist(), strict=True)
    ]


def _adapters(mini: RunSpec) -> Iterator[Check]:
    """Yield the checks of a model that is trained in part."""
    with torch.device("meta"):
        batches = _synthetic(mini, build_module(mini.model))
    yield from adapter_checks(mini.model, batches.at(0)[0])


def _check_with_own_dtypes(mini: RunSpec) -> Iterator[Check]:
    """Check placement, optimizer, ties, dtypes and traffic in steps with the run's own dtypes."""
    strategy, settings = mini.strategy, mini.train or TrainSettings()
    with torch.device("meta"):
        module = build_module(mini.model)
    aliases = {names[0]: names for names in parameter_names(module).values() if len(names) > 1}
    model = parallelize(module, strategy, device=torch.device("cpu"), seed=settings.seed)
    predicted = estimate_run(mini)
    yield _placement(model, strategy, predicted)
    optimizer = make_optimizer(model, mini.job.optimizer, settings)
    batches = _synthetic(mini, module)
    seen: set[torch.dtype] = set()
    first = next(iter(find_blocks(module).values()))
    hook = first.register_forward_pre_hook(lambda block, _: seen.update(_weights(block)))
    _step(model, batches.at(0), optimizer)  # makes lazy states
    hook.remove()
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [_local(p).clone() for p in trained]
    with CollectiveCounter(axes_of(model)) as counter:
        _step(model, batches.at(1), optimizer)
    moved = sum(not torch.equal(old, _local(new)) for old, new in zip(before, trained, strict=True))
    yield Check(
        "optimizer updates parameters",
        moved > 0,
        f"{moved} of {len(before)} tensors changed in one step"
        if moved
        else "no parameter changed; create the optimizer after sharding",
    )
    if len(trained) < sum(1 for _ in model.parameters()):
        yield _optimizer_states(optimizer, trained)
    yield _check_ties(module, aliases)
    yield _check_dtypes(strategy, seen, model)
    expected = by_operation(predicted.traffic)
    counted = {key: tuple(count) for key, count in counter.counts.items()}
    total = sum(calls for calls, _ in counted.values())
    yield Check(
        "collectives as predicted",
        counted == expected,
        f"{total} calls per step, calls and bytes equal the prediction"
        if counted == expected
        else f"{traffic_difference(expected, counted)}; please report this as a bug",
    )


def _optimizer_states(optimizer: torch.optim.Optimizer, trained: list[nn.Parameter]) -> Check:
    """Check that states belong to the trained parameters and are sharded like them."""
    name = "optimizer states as sharded"
    known = {id(p) for p in trained}
    strange = sum(id(p) not in known for p in optimizer.state)
    unlike = sum(
        isinstance(value, torch.Tensor)
        and value.ndim > 0
        and _local(value).shape != _local(p).shape
        for p, state in optimizer.state.items()
        for value in state.values()
        if isinstance(p, torch.Tensor)
    )
    if strange or unlike:
        return Check(
            name,
            False,
            f"{strange + unlike} states were made before wrapping or for frozen parameters; create "
            "the optimizer after sharding, from the parameters that are trained",
        )
    return Check(name, True, f"states of {len(optimizer.state)} trained tensors")


def _placement(model: nn.Module, strategy: Strategy, predicted: StepProfile) -> Check:
    """Check that ranks hold as many bytes of parameters as planned."""
    name = "sharded as planned"
    # The plan describes the rank with the most bytes; padding gives others a little less.
    largest = torch.tensor(sum(stored_bytes(p) for p in model.parameters()))
    if world()[1] > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    held = int(largest)
    planned = predicted.known_memory.terms["parameters"]
    if strategy.offload:
        planned = held
    if not strategy.sharded:
        ok = held == planned
        return Check(name, ok, f"{strategy}: every rank holds all {held:,} bytes of parameters")
    units = sum(isinstance(module, FSDPModule) for module in model.modules())
    unsharded = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
    if unsharded:
        return Check(name, False, f"{unsharded[0]} is not sharded")
    return Check(
        name,
        held == planned,
        f"{units} FSDP units, {held:,} bytes of parameters per rank"
        if held == planned
        else f"{held:,} bytes of parameters per rank, {planned:,} planned",
    )


def _check_ties(module: nn.Module, aliases: dict[str, list[str]]) -> Check:
    """Check that tied weights are still tied; `aliases` are their names before sharding."""
    name = "tied weights stay tied"
    if not aliases:
        return Check(name, True, "the model has no tied weights")
    now = {names[0]: names for names in parameter_names(module).values() if len(names) > 1}
    listed = "; ".join(" = ".join(names) for names in aliases.values())
    if now == aliases:
        return Check(name, True, listed)
    return Check(name, False, f"{listed} are no longer tied; tie them before parallelize")


def _check_dtypes(strategy: Strategy, seen: set[torch.dtype], model: nn.Module) -> Check:
    """Check the dtypes of trained parameters, and those `seen` in the forward of a block."""
    name = "dtypes as declared"
    computes = TORCH_DTYPES[strategy.param_dtype]
    master = TORCH_DTYPES[strategy.master_dtype]
    kept = {p.dtype for p in model.parameters() if p.requires_grad}
    # Autocast casts inside each operation: a block's weights keep the master dtype.
    expected = master if strategy.autocast else computes
    # The first block may be frozen.
    ok = seen <= {expected} and kept == {master}
    declared = f"computes in {strategy.param_dtype}, keeps {strategy.master_dtype}"
    actual = f"computes in {_dtype_names(seen)}, keeps {_dtype_names(kept)}"
    return Check(name, ok, declared if ok else f"declared: {declared}; actual: {actual}")


def _dtype_names(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _same_as_one_process(mini: RunSpec) -> Check:
    """Compare loss and gradient norm of the first step, in fp64, with one process."""
    name = "equal to one process"
    exact = mini.strategy.but(
        **dict.fromkeys(("param_dtype", "reduce_dtype", "master_dtype"), "fp64"),
        states=None,
        compress=None,
    )
    module, alone = (build_exact(mini.model) for _ in range(2))
    model = parallelize(module, exact, device=torch.device("cpu"))
    loss, norm = _step(model, _synthetic(mini, module).at(0))
    Materializer(alone, torch.device("cpu"), torch.float64).unit([alone])
    layout = Layout(
        0, 1, exact.micro_batch * exact.data_parallel, exact.accumulate, mini.job.seq_len
    )
    batch = SyntheticBatches(layout, vocabulary(mini.model, alone) or 256, 0).at(0)
    reference, reference_norm = _step(alone, batch)
    error = max(abs(loss / reference - 1), abs(norm / reference_norm - 1))
    detail = f"loss {loss:.6f}, gradient norm {norm:.6f}, relative error {error:.0e} in fp64"
    if error > _EXACT:
        detail += "; check for dropout, random numbers, or layers that mix sequences of a batch"
    return Check(name, error <= _EXACT, detail)


def build_exact(model: Model) -> nn.Module:
    """Build the module of a model on the meta device, in a form that computes in fp64."""
    with torch.device("meta"):
        module = build_module(with_base(model, "fp64"))
    return with_exact_experts(module)


def _equal_counts(run: RunSpec, mini: RunSpec) -> Check:
    """Check that all ranks get the same number of micro-batches in the first steps."""
    name, data = "equal micro-batch counts", run.data or DataSettings()
    strategy = mini.strategy
    if data.path and not data.source:
        return Check(name, True, "by construction: the step number determines the samples")
    micro = run.strategy.micro_batch if data.source else strategy.micro_batch
    seq_len = run.job.seq_len if data.source else mini.job.seq_len
    layout = layout_of(strategy.but(micro_batch=micro), seq_len)
    try:
        batches = make_batches(data, layout, 256, 0)
        for step in range(2):
            Agreement(step + 1, batches.at(step), stop=False, fewer=layout.fewer).result()
    except (SpecError, RuntimeError) as error:
        return Check(name, False, str(error))
    return Check(name, True, f"{strategy.accumulate} per step on each of {world()[1]} ranks")


# ---- one training step ---------------------------------------------------------------------------


def _step(
    model: nn.Module, batches: list[MicroBatch], optimizer: torch.optim.Optimizer | None = None
) -> tuple[float, float]:
    """Run forward and backward; return the loss and the gradient norm over all ranks.

    With an optimizer, update the parameters instead, and return zeros.
    """
    parallel = is_parallel(model)
    mesh = strategy_of(model).mesh if parallel else Mesh()
    loss_sum = loss_of(model)
    tokens = sum(batch.tokens for batch in batches) * mesh.data_parallel
    total = torch.zeros((), dtype=torch.float64)
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        with micro_batch(model, last=last) if parallel else torch.enable_grad():
            loss = loss_sum(*batch) * (mesh.replicate * mesh.states / tokens)
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return 0.0, 0.0
    norm = clip_gradients(model.parameters())
    if mesh.devices > 1:
        dist.all_reduce(total)
    return float(total) / mesh.devices, float(norm)


def _synthetic(mini: RunSpec, module: nn.Module) -> SyntheticBatches:
    """Synthetic batches for the reduced run."""
    layout = layout_of(mini.strategy, mini.job.seq_len)
    return SyntheticBatches(layout, vocabulary(mini.model, module) or 256, 0)


def _weights(block: nn.Module) -> set[torch.dtype]:
    """The dtypes of a block's trained parameters."""
    return {p.dtype for p in block.parameters() if p.requires_grad}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
