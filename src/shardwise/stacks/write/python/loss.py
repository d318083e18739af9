"""The loss of a script: plain, or computed in chunks as the trainer's engine does."""

from __future__ import annotations

from shardwise.spec.lookup import ModuleRef
from shardwise.spec.run import RunSpec
from shardwise.stacks.write.python.piece import Piece, lines
from shardwise.stacks.write.python.settings import on_cpu, torch_dtype


def chunks_loss(run: RunSpec) -> bool:
    return run.strategy.loss == "chunked"


def chunked_pieces(run: RunSpec, written: bool) -> list[Piece]:
    """Code that defines the chunked loss, which a written model uses; none for the plain loss."""
    if not chunks_loss(run):
        return []
    high = "" if run.strategy.param_dtype == "fp64" else ".float()"
    used = ("torch", "typing:Any", "collections.abc:Callable", "torch.nn.functional:cross_entropy")
    pieces = [Piece(_CHUNKED.replace("HIGH", high), used)]
    return pieces if written else [*pieces, Piece(_IN_CHUNKS, ("torch:nn", "typing:Any"))]


def loss_piece(run: RunSpec, written: bool) -> Piece:
    """Code that defines `loss_sum`."""
    if chunks_loss(run) and run.strategy.mesh.inner == 1:
        body = f"    return {chunked_call(written)}"
        return Piece(
            lines(*_SIGNATURE, _in_autocast(run, body) if run.strategy.autocast else body),
            ("torch", "torch:nn"),
        )
    if run.strategy.mesh.inner > 1:
        return _of_positions(run, written)
    logits = "model(ids[:, :-1])" if written else "model(input_ids=ids[:, :-1]).logits"
    unwrap = ""
    if isinstance(run.model, ModuleRef):
        logits = "model(ids[:, :-1])"
        unwrap = '    logits = getattr(logits, "logits", logits)'
    assign = f"    logits = {logits}"
    logits = "logits" if run.strategy.param_dtype == "fp64" else "logits.float()"
    code = lines(
        *_SIGNATURE,
        _in_autocast(run, assign) if run.strategy.autocast else assign,
        unwrap,
        f'    return cross_entropy({logits}.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")',
    )
    return Piece(code, ("torch", "torch:nn", "torch.nn.functional:cross_entropy"))


def _of_positions(run: RunSpec, written: bool) -> Piece:
    """The loss of the tokens that a rank computes, of logits that may be divided by vocabulary."""
    strategy = run.strategy
    logits = "model(ids[:, positions], positions)"
    if not written:
        logits = "model(input_ids=ids[:, positions], position_ids=positions[None]).logits"
    high = "logits" if strategy.param_dtype == "fp64" else "logits.float()"
    loss = f'cross_entropy({high}.flatten(0, 1), targets.flatten(), reduction="sum")'
    whole = strategy.tensor > 1
    plain = not chunks_loss(run)
    code = lines(
        "def loss_sum(model: nn.Module, ids: torch.Tensor, positions: torch.Tensor) "
        "-> torch.Tensor:",
        '    """The loss of these tokens of a micro-batch, summed."""',
        "    targets = ids[:, positions + 1]",
        not plain and "    return model(ids[:, positions], positions, targets)",
        plain and f"    logits = {logits}",
        plain and f"    {'loss =' if whole else 'return'} {loss}",
        whole and "    # Every rank of a tensor group has it.",
        whole and "    return loss.full_tensor()",
    )
    used = ("torch", "torch:nn")
    return Piece(code, (*used, "torch.nn.functional:cross_entropy") if plain else used)


def chunked_call(written: bool, model: str = "model") -> str:
    """The expression for the chunked loss of `ids`, summed over tokens."""
    if written:
        return f"{model}(ids[:, :-1], ids[:, 1:])"
    return f"{model}(input_ids=ids[:, :-1], targets=ids[:, 1:])"


_SIGNATURE = (
    "def loss_sum(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:",
    '    """The loss of a micro-batch, summed over its tokens."""',
)


def _in_autocast(run: RunSpec, statement: str) -> str:
    kind = "cpu" if on_cpu(run) else "cuda"
    dtype = torch_dtype(run.strategy.param_dtype)
    return f'    with torch.autocast("{kind}", dtype={dtype}):\n    {statement}'


_CHUNKED = '''
class ChunkedLoss(torch.autograd.Function):
    """Cross entropy, summed over tokens, with the logits of one chunk of tokens at a time.

    Gradients are computed in the forward pass, as those of a mean; the backward pass scales them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        head: Callable[[torch.Tensor], torch.Tensor],
        x: torch.Tensor,
        targets: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        tokens, losses, sums = targets.numel(), [], ()
        rows = -(-tokens // LOSS_CHUNKS)
        x_gradient = torch.empty_like(x)
        parts, places = (
            tensor.view(1, -1, x.shape[-1]).split(rows, dim=1) for tensor in (x, x_gradient)
        )
        for part, place, labels in zip(parts, places, targets.flatten().split(rows)):
            part = part.detach().requires_grad_()
            with torch.enable_grad():
                loss = cross_entropy(head(part)HIGH.flatten(0, 1), labels, reduction="sum")
                gradients = torch.autograd.grad(loss / tokens, (part, *parameters))
            losses.append(loss.detach())
            place.copy_(gradients[0])
            sums = tuple(a.add_(b) for a, b in zip(sums, gradients[1:])) or gradients[1:]
            del gradients
        ctx.tokens, ctx.gradients = tokens, (x_gradient, *sums)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        scale = grad_output * ctx.tokens
        x_gradient, *sums = (gradient.mul_(scale) for gradient in gradients)
        return None, x_gradient, None, *sums
'''

_IN_CHUNKS = '''
def compute_loss_in_chunks(model: nn.Module) -> None:
    """Let `model(input_ids=ids, targets=targets)` return the loss, summed over tokens."""
    forward, decoder, head = model.forward, model.get_decoder(), model.get_output_embeddings()
    # Parameters of anything else would get no gradient.
    assert {*model.parameters()} <= {*decoder.parameters(), *head.parameters()}

    def loss_sum(input_ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        outputs = decoder(input_ids=input_ids)
        hidden, kind = outputs.last_hidden_state, type(outputs)

        def logits(part: torch.Tensor) -> torch.Tensor:
            # All that the model does after its decoder: the head, caps and scales of logits.
            decoder.forward = lambda *_, **__: kind(last_hidden_state=part)
            try:
                return forward(input_ids=input_ids).logits
            finally:
                del decoder.forward

        return ChunkedLoss.apply(logits, hidden, targets, *head.parameters())

    model.forward = loss_sum
'''
