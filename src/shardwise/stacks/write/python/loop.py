"""The loop of a script, from joining the other processes to the last save."""

from __future__ import annotations

from textwrap import indent

from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.stacks.write.python import axes, foreign
from shardwise.stacks.write.python.data import knows_vocabulary
from shardwise.stacks.write.python.loss import chunks_loss
from shardwise.stacks.write.python.parallel import needs_preparing
from shardwise.stacks.write.python.piece import Piece, lines
from shardwise.stacks.write.python.settings import logged_always, on_cpu, torch_dtype, train_of
from shardwise.stacks.write.python.step import changes_rate, is_fused


def loop_pieces(run: RunSpec, written: bool) -> list[Piece]:
    """`train`, its call and, with several processes, the end of the process group."""
    alone = run.strategy.kind == "single"
    gloo = not alone and on_cpu(run)
    call = lines(
        'if __name__ == "__main__":\n    train()',
        not alone and _DONE,
        # A thread of Gloo that still holds tensors when Python ends would abort it.
        gloo and "    dist.barrier()  # lets threads release their last tensors",
        not alone and "    dist.destroy_process_group()",
    )
    return [_train(run, written), Piece(call, () if alone else ("gc",))]


_DONE = """
    # A model that outlives its process group can hang in the group's destructor.
    gc.collect()
"""


def _train(run: RunSpec, written: bool) -> Piece:
    train, strategy = train_of(run), run.strategy
    alone = strategy.kind == "single"
    start, start_imports = _start(run)
    build, build_imports = build_model(run, written)
    saves = train.checkpoint.save
    arguments = "0, 1" if alone else axes.data_ranks(strategy)
    code = lines(
        "def train() -> None:",
        start,
        build,
        axes.has_axes(run) and axes.context_lines(strategy),
        "    optimizer = make_optimizer(model)",
        f"    batches = micro_batches({arguments}{'' if knows_vocabulary(run) else ', vocab'})",
        "    OUTPUT.mkdir(parents=True, exist_ok=True)",
        _window(run),
        """

    for step in range(STEPS):
        loss = torch.zeros((), device=device)
""",
        _micro_batches(run),
        "        norm = clip_gradients(model)" if train.clip_norm else None,
        "        norm = gradient_norm(model)" if not train.clip_norm else None,
        _guard(run),
        changes_rate(run)
        and """
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
""",
        _update(run),
        "        # Gradients are views of the buckets: set to None they would get a second copy."
        if strategy.kind == "ddp"
        else None,
        f"        optimizer.zero_grad({'set_to_none=False' if strategy.kind == 'ddp' else ''})",
        "        losses += loss\n        steps += 1",
        _log(run),
        saves
        and train.checkpoint.every is not None
        and """
        if (step + 1) % SAVE_EVERY == 0 and step + 1 < STEPS:
            save(model, optimizer, step + 1)
""",
        saves and "\n",
        saves and "    save(model, optimizer, STEPS)",
    )
    imports = ["torch", "json", "time", *start_imports, *build_imports]
    if strategy.tensor > 1:
        imports.append("torch.distributed.tensor.parallel:loss_parallel")
    if strategy.context > 1:
        imports.append("torch.distributed.device_mesh:init_device_mesh")
    if strategy.kind == "ddp" and _skips_sync(run):
        imports.append("contextlib:nullcontext")
    return Piece(code, tuple(imports))


def _start(run: RunSpec) -> tuple[str, tuple[str, ...]]:
    counted = ("os",) if train_of(run).threads is None else ()
    if run.strategy.kind == "single":
        if on_cpu(run):
            return lines(_threads(run), '    device = torch.device("cpu")'), counted
        return '    device = torch.device("cuda")', ()
    if on_cpu(run):
        text = lines(
            '    dist.init_process_group("gloo")',
            "    rank, world = dist.get_rank(), dist.get_world_size()",
            _threads(run),
            '    device = torch.device("cpu")',
        )
        return text, (*counted, "torch.distributed as dist")
    # The norm of offloaded gradients is reduced on CPUs.
    backend = "cpu:gloo,cuda:nccl" if run.strategy.offload else "nccl"
    text = lines(
        '    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))',
        "    torch.cuda.set_device(device)",
        f'    dist.init_process_group("{backend}", device_id=device)',
        "    rank, world = dist.get_rank(), dist.get_world_size()",
    )
    return text, ("os", "torch.distributed as dist")


def _threads(run: RunSpec) -> str:
    """Set the number of threads, which affects the last bits of sums."""
    if train_of(run).threads is not None:
        return "    torch.set_num_threads(THREADS)"
    if run.strategy.kind == "single":
        return "    torch.set_num_threads(os.cpu_count() or 1)"
    return lines(
        "    # The processes of a machine share its cores.",
        '    local_world = int(os.environ["LOCAL_WORLD_SIZE"])',
        "    torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world))",
    )


def build_model(run: RunSpec, written: bool) -> tuple[str, tuple[str, ...]]:
    strategy = run.strategy
    meta = strategy.sharded if written else foreign.fills(run)
    made = "Transformer()" if written else "build()"
    if written and strategy.master_dtype != "fp32":
        made += f".to({torch_dtype(strategy.master_dtype)})"
    place = '"meta"' if meta else "device"
    imports: list[str] = []
    mesh = ""
    if axes.has_axes(run):
        mesh, found = axes.mesh_lines(strategy)
        imports += found
    elif strategy.sharded:
        imports.append("torch.distributed.device_mesh:init_device_mesh")
        mesh = '    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))'
        if strategy.hybrid:
            mesh = lines(
                "    # Sharded inside a group, replicated across groups.",
                '    axes = ("replicate", "shard")',
                "    mesh = init_device_mesh(device.type, (REPLICATE, SHARD), mesh_dim_names=axes)",
            )
    if strategy.kind == "ddp":
        imports.append("torch.nn.parallel:DistributedDataParallel")
    return lines(
        mesh,
        not written and not foreign.fills(run) and "    torch.manual_seed(SEED)",
        f"    with torch.device({place}):",
        f"        model = {made}",
        not knows_vocabulary(run) and "    vocab = vocabulary(model)",
        chunks_loss(run) and not written and "    compute_loss_in_chunks(model)",
        not strategy.sharded and written and "    initialize(model)",
        not strategy.sharded
        and not written
        and foreign.fills(run)
        and "    Initializer(model, device)(model)",
        strategy.sharded and "    shard(model, mesh, device)",
        not strategy.sharded and needs_preparing(run) and "    prepare(model)",
        strategy.kind == "ddp" and _replicated(run, written),
    ), tuple(imports)


def _replicated(run: RunSpec, written: bool) -> str:
    options = ["gradient_as_bucket_view=True"]
    if run.strategy.ddp_bucket_mib is not None:
        options.insert(0, "bucket_cap_mb=BUCKET_MIB")
    if not written:
        options.append("forward_sync_buffers=False")
    call = f"    model = DistributedDataParallel(model, {', '.join(options)})"
    if len(call) <= 100:
        return call
    return lines(
        "    model = DistributedDataParallel(", f"        model, {', '.join(options)}", "    )"
    )


def _window(run: RunSpec) -> str:
    return lines(
        run.strategy.kind == "single"
        and '    log = (OUTPUT / "metrics.jsonl").open("w", buffering=1)',
        run.strategy.kind != "single"
        and '    log = (OUTPUT / "metrics.jsonl").open("w", buffering=1) if rank == 0 else None',
        "    losses = torch.zeros((), dtype=torch.float64, device=device)",
        "    steps, since = 0, time.perf_counter()",
        _stops_later(run) and "    broken = torch.zeros((), device=device)",
    )


def _skips_sync(run: RunSpec) -> bool:
    strategy = run.strategy
    return strategy.accumulate > 1 and strategy.kind == "ddp" and strategy.grad_sync != "every"


def sync_calls(strategy: Strategy, model: str) -> list[str]:
    """FSDP calls before each micro-batch; `last` is true for the last one of a step."""
    calls = []
    if strategy.accumulate > 1 and strategy.sharded:
        if strategy.grad_sync == "last":
            calls.append(f"{model}.set_requires_gradient_sync(last)")
        if strategy.grad_sync == "local" and strategy.hybrid:
            calls.append(f"{model}.set_requires_all_reduce(last)")
        if not strategy.reshard_after_backward:
            calls.append(f"{model}.set_reshard_after_backward(last)")
    return calls


def _micro_batches(run: RunSpec) -> str:
    strategy = run.strategy
    calls = sync_calls(strategy, "model")
    skips = _skips_sync(run)
    differs = skips or bool(calls)
    # Gradients of logits that are divided by vocabulary are computed inside too.
    divided = strategy.tensor > 1
    inner = "    " if skips or divided else ""
    return lines(
        f"        for {'number' if differs else '_'} in range(ACCUMULATE):",
        differs and "            last = number == ACCUMULATE - 1",
        *(f"            {call}" for call in calls),
        "            ids = next(batches).to(device, non_blocking=True)",
        skips and "            with nullcontext() if last else model.no_sync():",
        divided and "            with loss_parallel():",
        strategy.kind != "single"
        and f"            {inner}# Averaged over ranks: the mean over all tokens of a step.",
        f"            {inner}part = {_scaled(run)}",
        f"            {inner}part.backward()",
        "            loss += part.detach()",
    )


def _scaled(run: RunSpec) -> str:
    """The loss of a micro-batch, as a share of the mean over a step."""
    tokens = "(ACCUMULATE * MICRO_BATCH * SEQ_LEN)"
    if not axes.has_axes(run):
        return f"loss_sum(model, ids) * (1 / {tokens})"
    # Each rank of a sequence has a part of its tokens, and the average counts each rank.
    parts = "CONTEXT" if run.strategy.context > 1 else "1"
    return f"loss_sum(model, ids, positions) * ({parts} / {tokens})"


_FLAG = (
    "        # The fused optimizer reads this flag on the device and skips the update if it is 1."
)


def _stops_later(run: RunSpec) -> bool:
    """Whether a non-finite gradient ends the run at the next log line."""
    return train_of(run).non_finite == "stop" and is_fused(run)


def _update(run: RunSpec) -> str:
    if is_fused(run) or train_of(run).non_finite == "stop":
        return "        optimizer.step()"
    return "        if norm.isfinite():\n            optimizer.step()"


def _guard(run: RunSpec) -> str:
    """Handle non-finite gradients, without waiting for the device if the optimizer is fused."""
    if not is_fused(run):
        stop = """
        if not norm.isfinite():
            raise SystemExit("a gradient was not finite; its update was not applied")
"""
        return lines(train_of(run).non_finite == "stop" and stop)
    moved = ".to(device)" if run.strategy.offload else ""
    bad = f"(~norm.isfinite()).float(){moved}"
    if train_of(run).non_finite == "skip":
        return lines(
            _FLAG,
            f"        optimizer.found_inf = {bad}",
        )
    return lines(
        _FLAG,
        f"        optimizer.found_inf = broken = torch.maximum(broken, {bad})",
    )


def _log(run: RunSpec) -> str:
    alone = run.strategy.kind == "single"
    share = "losses.item() / steps" if alone else "losses.item() / world / steps"
    body = lines(
        not alone and "dist.all_reduce(losses)",
        not alone and "if rank == 0:",
        indent(_LINE.strip("\n").replace("LOSS", share), "" if alone else "    "),
        _stops_later(run)
        and """
if broken:
    raise SystemExit("a gradient was not finite; its update was not applied")
""",
        "losses.zero_()\nsteps, since = 0, time.perf_counter()",
    )
    if logged_always(run):
        return indent(body, " " * 8)
    when = "        if (step + 1) % LOG_EVERY == 0 or step in (0, STEPS - 1):"
    return lines(when, indent(body, " " * 12))


# The loss first: reading it waits for the device, and the clock must not be read before.
_LINE = """
line = {
    "step": step + 1,
    "loss": LOSS,
    "gradient_norm": norm.item(),
    "learning_rate": optimizer.param_groups[0]["lr"],
    "step_s": (time.perf_counter() - since) / steps,
}
log.write(json.dumps(line) + "\\n")
print(*(f"{key} {value:.6g}" for key, value in line.items()), flush=True)
"""
