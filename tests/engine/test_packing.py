"""Packed examples: the loss, logits and gradients of each alone, for every accepted model."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from shardwise.spec.record import SpecError
from tests.units.reduced import build, reduced

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from shardwise.engine.head_with_loss import IGNORED  # noqa: E402
from shardwise.engine.loss import apply_chunked_loss, logits_of, loss_of  # noqa: E402
from shardwise.engine.packing import ARCHITECTURES, check_packing  # noqa: E402
from shardwise.engine.parallelize import parallelize  # noqa: E402
from shardwise.spec.strategy import Strategy  # noqa: E402

LENGTHS = (13, 1, 10)
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 101,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 64,
    "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "num_local_experts": 4,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "sliding_window": 8,
}  # fmt: skip


def small(architecture: str) -> Any:
    """A model of an architecture with a few thousand parameters and short sliding windows."""
    known = transformers.AutoConfig.for_model(architecture)
    sizes = {name: value for name, value in SIZES.items() if hasattr(known, name)}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(architecture, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def packed(rows: int = 2) -> tuple[Any, Any, Any]:
    """Ids, targets and positions of rows of examples; some tokens do not count."""
    data = torch.Generator().manual_seed(1)
    ids, targets = torch.randint(3, 101, (2, rows, sum(LENGTHS)), generator=data)
    targets[:, ::3] = IGNORED
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).repeat(rows, 1)
    return ids, targets, positions


def alone(*tensors: Any) -> list[Any]:
    """Each example of packed tensors as a batch of its own."""
    parts = [tensor.split(LENGTHS, dim=1) for tensor in tensors]
    return [
        tuple(part[row : row + 1] for part in example)
        for example in zip(*parts, strict=True)
        for row in range(len(tensors[0]))
    ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_accepted_model_keeps_examples_apart(architecture: str) -> None:
    model = small(architecture)
    check_packing(model)
    ids, _, positions = packed()
    logits = logits_of(model)
    with torch.no_grad():
        together = logits(ids, positions)
        for (part,), (found,) in zip(alone(ids), alone(together), strict=True):
            assert (found - logits(part)).abs().max() <= 1e-5


@pytest.mark.parametrize("loss", ["plain", "chunked"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_loss_and_gradients_are_those_of_the_examples_alone(
    family: str, loss: str, attention: str
) -> None:
    torch.manual_seed(0)
    spec = reduced(family, hidden=64, head_dim=16, ffn=96, vocab=101, dropout=0.0)
    model = build(spec, device="cpu", attention=attention).eval()
    strategy = Strategy(kind="single", param_dtype="fp32", loss=loss, loss_chunks=3)
    model = parallelize(model, strategy, device=torch.device("cpu"))
    ids, targets, positions = packed()
    count = int((targets != IGNORED).sum())
    sums = []
    for batches in ([(ids, targets, positions)], alone(ids, targets)):
        model.zero_grad()
        parts = [loss_of(model)(*batch) / count for batch in batches]
        torch.stack(parts).sum().backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        sums.append((float(sum(part.detach().double() for part in parts)), gradients))
    (found, ours), (expected, theirs) = sums
    assert found == pytest.approx(expected, rel=1e-6)
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    for name, gradient in theirs.items():
        assert float((ours[name] - gradient).abs().max()) <= 1e-6 * largest, name


def test_all_layers_keep_one_mask() -> None:
    ids, _, positions = packed()
    kept = set()

    def keep(tensor: Any) -> Any:
        if tensor.shape[-2:] == (sum(LENGTHS), sum(LENGTHS)):
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = logits_of(small("llama"))(ids, positions)
    assert len(kept) == 1
    assert logits.requires_grad


def test_a_cache_does_not_hide_the_boundaries() -> None:
    """transformers looks for boundaries only without a cache, which a factory may have left on."""
    model = small("llama")
    model.config.use_cache = True
    ids, _, positions = packed()
    changed = ids.clone()
    changed[:, : LENGTHS[0]] = 5
    with torch.no_grad():
        one, other = logits_of(model)(ids, positions), logits_of(model)(changed, positions)
    assert torch.equal(one[:, LENGTHS[0] :], other[:, LENGTHS[0] :])


def test_models_that_mix_examples_are_refused() -> None:
    with pytest.raises(SpecError, match=r"^data\.packing: opt .*packing = false"):
        check_packing(build(reduced("opt"), attention="sdpa"))
    with pytest.raises(SpecError, match=r"^data\.packing: Linear "):
        check_packing(torch.nn.Linear(2, 2))
    model = copy.deepcopy(small("llama"))
    apply_chunked_loss(model, 2)
    check_packing(model)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(SpecError, match="flash_attention_2"):
        check_packing(model)
