"""The functions of a script's loop: optimizer, learning rate, loss, gradient norm, save."""

from __future__ import annotations

from shardwise.spec.run import RunSpec
from shardwise.stacks.write.python.loss import loss_piece
from shardwise.stacks.write.python.piece import Piece, lines
from shardwise.stacks.write.python.settings import train_of


def step_pieces(run: RunSpec, written: bool) -> list[Piece]:
    """Code that defines the functions, in the order of their use."""
    return [_optimizer(run), _rate(run), loss_piece(run, written), _norm(run), _save(run)]


def changes_rate(run: RunSpec) -> bool:
    train = train_of(run)
    return train.schedule != "constant" or train.warmup_steps > 0


def is_fused(run: RunSpec) -> bool:
    """Whether the optimizer is fused: a flag on the device can cancel its update.

    torch 2.13 has no fused SGD for sharded parameters.
    """
    return not (run.strategy.sharded and run.job.optimizer in ("sgd", "momentum"))


# Those that torch has and the script can name.
OPTIMIZERS = ("adamw", "adam", "momentum", "sgd")


def _optimizer(run: RunSpec) -> Piece:
    fused = ", fused=True" if is_fused(run) else ""
    calls = {
        "adamw": "AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, fused=True)",
        "adam": "Adam(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, fused=True)",
        "momentum": f"SGD(groups, lr=LEARNING_RATE, momentum=MOMENTUM{fused})",
        "sgd": f"SGD(groups, lr=LEARNING_RATE{fused})",
    }
    call = calls[run.job.optimizer]
    code = f'''
def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay applies to matrices, not to norms and biases."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {{"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY}},
        {{"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}},
    ]
    return torch.optim.{call}
'''
    return Piece(code, ("torch", "torch:nn"))


def _rate(run: RunSpec) -> Piece:
    train = train_of(run)
    if not changes_rate(run):
        return Piece("")
    warms = train.warmup_steps > 0
    since = "(step - WARMUP_STEPS) / max(1, STEPS - WARMUP_STEPS)" if warms else "step / STEPS"
    cosine = train.schedule == "cosine"
    code = lines(
        "def learning_rate(step: int) -> float:",
        warms
        and """
    if step < WARMUP_STEPS:
        return LEARNING_RATE * (step + 1) / WARMUP_STEPS
""",
        cosine
        and f"""
    share = {since}
    cosine = 0.5 * (1 + math.cos(math.pi * share))
    return LEARNING_RATE * (FINAL_SHARE + (1 - FINAL_SHARE) * cosine)
""",
        train.schedule == "linear"
        and f"""
    share = {since}
    return LEARNING_RATE * (FINAL_SHARE + (1 - FINAL_SHARE) * (1 - share))
""",
        train.schedule == "constant" and "    return LEARNING_RATE",
    )
    return Piece(code, ("math",) if cosine else ())


def _norm(run: RunSpec) -> Piece:
    clips = train_of(run).clip_norm > 0
    if run.strategy.tensor > 1 and not run.strategy.sequence_parallel:
        return _norm_by_mesh(clips)
    # The norm of a sharded gradient is sharded too.
    whole = ".full_tensor()" if run.strategy.sharded else ""
    code = lines(
        f"def {'clip_gradients' if clips else 'gradient_norm'}(model: nn.Module) -> torch.Tensor:",
        '    """Clip gradients to CLIP_NORM; return their global norm before clipping."""'
        if clips
        else '    """The global gradient norm, over all ranks."""',
        "    parameters = [p for p in model.parameters() if p.grad is not None]",
        f"    norm = get_total_norm([p.grad for p in parameters]){whole}",
        clips and "    clip_grads_with_norm_(parameters, CLIP_NORM, norm)",
        "    return norm",
    )
    used = ("torch", "torch:nn", "torch.nn.utils:get_total_norm")
    return Piece(code, (*used, "torch.nn.utils:clip_grads_with_norm_") if clips else used)


def _norm_by_mesh(clips: bool) -> Piece:
    """Norms are not divided, so that their gradients lie on another mesh than those of matrices."""
    code = lines(
        f"def {'clip_gradients' if clips else 'gradient_norm'}(model: nn.Module) -> torch.Tensor:",
        '    """Clip gradients to CLIP_NORM; return their global norm before clipping."""'
        if clips
        else '    """The global gradient norm, over all ranks."""',
        """
    groups: dict[DeviceMesh, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            groups.setdefault(parameter.grad.device_mesh, []).append(parameter)
    norms = [get_total_norm([p.grad for p in group]).full_tensor() for group in groups.values()]
    norm = torch.linalg.vector_norm(torch.stack(norms))
""",
        clips and "    for group in groups.values():",
        clips and "        clip_grads_with_norm_(group, CLIP_NORM, norm)",
        "    return norm",
    )
    mesh, total = "torch.distributed.device_mesh:DeviceMesh", "torch.nn.utils:get_total_norm"
    used = ("torch", "torch:nn", mesh, total)
    return Piece(code, (*used, "torch.nn.utils:clip_grads_with_norm_") if clips else used)


def _save(run: RunSpec) -> Piece:
    if not train_of(run).checkpoint.save:
        return Piece("")
    if run.strategy.kind == "single":
        code = """
def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, OUTPUT / f"step-{step}.pt")
"""
        return Piece(code, ("torch", "torch:nn"))
    code = '''
def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Save a sharded checkpoint, which any number of ranks can load."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.save(state, checkpoint_id=OUTPUT / f"step-{step}")
'''
    state = "torch.distributed.checkpoint.state_dict:get_state_dict"
    return Piece(code, ("torch", "torch:nn", "torch.distributed.checkpoint as dcp", state))
