"""The code of a script that recomputes, compiles, shards or replicates its model."""

from __future__ import annotations

from shardwise.spec.model import ModelSpec
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.stacks.write.python import foreign
from shardwise.stacks.write.python.piece import Piece, lines
from shardwise.stacks.write.python.settings import on_cpu, torch_dtype
from shardwise.units.decoder import decoder_units


def parallel_pieces(run: RunSpec, written: bool) -> list[Piece]:
    """Code that defines `shard`, or `prepare` where nothing is sharded but blocks are changed.

    `written`: the model is defined in the script, not built by other code.
    """
    strategy = run.strategy
    pieces = []
    if strategy.recompute == "selective":
        imports = ("torch.utils.checkpoint:CheckpointPolicy", "typing:Any", "torch")
        more = "torch.utils.checkpoint:create_selective_checkpoint_contexts"
        pieces.append(Piece(_SELECTIVE, (*imports, more)))
    prepare = _sharded(run, written) if strategy.sharded else _unsharded(run, written)
    return [*pieces, prepare]


def needs_preparing(run: RunSpec) -> bool:
    """Whether an unsharded model is recomputed or compiled."""
    return run.strategy.compile or _recomputes(run.strategy)


def _recomputes(strategy: Strategy) -> bool:
    return strategy.recompute == "selective" or strategy.full_recompute_share > 0


def _blocks(run: RunSpec, written: bool) -> str:
    return "list(model.model.layers)" if written else foreign.blocks_of(run)


def _change_blocks(run: RunSpec) -> str:
    """Recompute, then compile; fully_shard adds its hooks outside both."""
    strategy = run.strategy
    share = strategy.full_recompute_share
    some = 0 < share < 1
    chosen = "blocks[: math.ceil(RECOMPUTE_SHARE * len(blocks) - 1e-9)]" if some else "blocks"
    selective = strategy.recompute == "selective"
    context = "use_reentrant=False, context_fn=keep_half_of_matmuls"
    recompute = _recomputes(strategy) and lines(
        "    # Inside the hooks of fully_shard: one gather serves recompute and backward."
        if strategy.sharded
        else "",
        selective and f"    recomputed = partial(checkpoint, {context})",
        f"    for block in {chosen}:",
        selective and "        block.forward = partial(recomputed, block.forward)",
        not selective
        and "        block.forward = partial(checkpoint, block.forward, use_reentrant=False)",
    )
    compiled = strategy.compile and "    for block in blocks:\n        block.compile()"
    return lines(recompute, compiled)


def _change_imports(strategy: Strategy) -> tuple[str, ...]:
    if not _recomputes(strategy):
        return ()
    some = 0 < strategy.full_recompute_share < 1
    used = ("functools:partial", "torch.utils.checkpoint:checkpoint")
    return (*used, "math") if some else used


def _sharded(run: RunSpec, written: bool) -> Piece:
    strategy = run.strategy
    places = _places(run)
    tensor = strategy.tensor > 1
    policy, imports = _policy(strategy, on_cpu(run), places)
    several = strategy.blocks_per_unit > 1
    prefetch = strategy.prefetch != 1 or strategy.forward_prefetch > 0
    fills = written or foreign.fills(run)
    code = lines(
        "def shard(model: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:",
        f'    """{_summary(strategy)}"""',
        f"    blocks = {_blocks(run, written)}",
        _change_blocks(run),
        places and _PLACEMENT,
        policy,
        fills and not written and "    initialize = Initializer(model, device)",
        prefetch and several and "    units = []",
        _several(prefetch, fills, written, tensor)
        if several
        else _one_by_one(fills, written, tensor),
        fills and _fill_rest(written),
        tensor and '    divide_ends(model, mesh["tensor"])',
        "    # Used first and last: resharding in between would only gather it twice.",
        "    fully_shard(model, reshard_after_forward=False, **settings)",
        _prefetch(strategy, several) if prefetch else "",
    )
    used = ("torch", "torch:nn", "torch.distributed.device_mesh:DeviceMesh")
    return Piece(code, (*used, *imports, *_change_imports(strategy)))


def _summary(strategy: Strategy) -> str:
    what = {
        "zero3": "ZeRO-3: shard block by block; a block is unsharded only while it computes.",
        "zero2": "ZeRO-2: shard block by block; parameters stay gathered until the backward.",
        "zero1": "ZeRO-1: shard block by block; gradients are reduced in the last micro-batch.",
    }
    return what[strategy.kind]


def _one_by_one(fills: bool, written: bool, tensor: bool) -> str:
    numbered = fills and written
    return lines(
        "    for number, block in enumerate(blocks):" if numbered else "    for block in blocks:",
        numbered
        and '        initialize(block.named_modules(prefix=f"model.layers.{number}"), device)',
        fills and not written and "        initialize(block)",
        tensor and '        divide_block(block, mesh["tensor"])',
        "        fully_shard(block, reshard_after_forward=RESHARD_AFTER_FORWARD, **settings)",
    )


def _several(prefetch: bool, fills: bool, written: bool, tensor: bool) -> str:
    return lines(
        "    for start in range(0, len(blocks), BLOCKS_PER_UNIT):",
        "        members = blocks[start : start + BLOCKS_PER_UNIT]",
        fills and written and "        for number, block in enumerate(members, start):",
        fills and not written and "        for block in members:",
        fills
        and written
        and '            initialize(block.named_modules(prefix=f"model.layers.{number}"), device)',
        fills and not written and "            initialize(block)",
        tensor and not fills and "        for block in members:",
        tensor and '            divide_block(block, mesh["tensor"])',
        "        fully_shard(members, reshard_after_forward=RESHARD_AFTER_FORWARD, **settings)",
        prefetch and "        units.append(members[0])",
    )


def _fill_rest(written: bool) -> str:
    return "    initialize(model.named_modules(), device)" if written else "    initialize(model)"


def _prefetch(strategy: Strategy, several: bool) -> str:
    units = "units" if several else "blocks"
    return lines(
        strategy.prefetch != 1
        and f"""
    order = [*{units}, model]
    for index, unit in enumerate(order):
        ahead = order[max(0, index - BACKWARD_PREFETCH) : index][::-1]
        # An empty list means the default; a unit that prefetches itself prefetches none.
        unit.set_modules_to_backward_prefetch(ahead or [unit])
""",
        strategy.forward_prefetch > 0
        and f"""
    for index, unit in enumerate({units}):
        ahead = {units}[index + 1 : index + 1 + FORWARD_PREFETCH]
        unit.set_modules_to_forward_prefetch(ahead)
""",
    )


def _places(run: RunSpec) -> bool:
    """Whether a parameter is sharded along another dimension than the first."""
    strategy, model = run.strategy, run.model
    if not isinstance(strategy.reshard_after_forward, bool):
        return False
    if not isinstance(model, ModelSpec):
        # Its tensors are known only where it is built.
        return True
    units = decoder_units(model, run.job.seq_len).units
    return any(unit.rearranged(strategy.mesh.states) for unit in units)


_PLACEMENT = '''

    shards = mesh["shard"].size()

    def place(parameter: nn.Parameter) -> Shard:
        """Stacked experts are divided along the first dimension that needs no padding."""
        even = [dim for dim, size in enumerate(parameter.shape) if size % shards == 0]
        return Shard(even[0] if even and parameter.ndim > 2 else 0)

'''


def _policy(strategy: Strategy, cpu: bool, places: bool) -> tuple[str, tuple[str, ...]]:
    dtypes = [strategy.param_dtype, strategy.reduce_dtype, strategy.master_dtype]
    param, reduce, master = dtypes
    given = {
        "param_dtype": None if param == master else param,
        "reduce_dtype": None if reduce == param == master else reduce,
    }
    words = ", ".join(f"{k}={torch_dtype(v)}" for k, v in given.items() if v is not None)
    imports = ["torch.distributed.fsdp:fully_shard"]
    if words:
        imports.append("torch.distributed.fsdp:MixedPrecisionPolicy")
    if strategy.offload:
        imports.append("torch.distributed.fsdp:CPUOffloadPolicy")
    if places:
        imports.append("torch.distributed.tensor:Shard")
    mesh = "mesh"
    if strategy.tensor > 1:
        mesh = 'mesh["replicate", "shard"]' if strategy.mesh.replicate > 1 else 'mesh["shard"]'
    if not words and not strategy.offload and not places:
        return f'    settings = {{"mesh": {mesh}}}', tuple(imports)
    pinned = "pin_memory=False" if cpu else ""
    return lines(
        "    settings = {",
        f'        "mesh": {mesh},',
        words and f'        "mp_policy": MixedPrecisionPolicy({words}),',
        strategy.offload and f'        "offload_policy": CPUOffloadPolicy({pinned}),',
        places and '        "shard_placement_fn": place,',
        "    }",
    ), tuple(imports)


def _unsharded(run: RunSpec, written: bool) -> Piece:
    if not needs_preparing(run):
        return Piece("")
    code = lines(
        "def prepare(model: nn.Module) -> None:",
        f"    blocks = {_blocks(run, written)}",
        _change_blocks(run),
    )
    return Piece(code, ("torch:nn", *_change_imports(run.strategy)))


_SELECTIVE = '''
def keep_half_of_matmuls() -> Any:
    """Save the outputs of attention and of every other matmul; recompute the rest."""
    matmuls = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    seen = {False: 0, True: 0}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = "_scaled_dot_product" in operation.__name__
        if operation in matmuls:
            seen[context.is_recompute] += 1
            keep = seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
'''
