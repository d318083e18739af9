"""The chunked loss on one process: every family, every keyword, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from shardwise.spec.families import FAMILIES
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from tests.units.reduced import build, reduced

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from shardwise.engine.loss import apply_chunked_loss, loss_of  # noqa: E402
from shardwise.engine.parallelize import parallelize  # noqa: E402

VOCAB = 211
SMALL: dict[str, Any] = {"hidden": 64, "head_dim": 16, "ffn": 96, "vocab": VOCAB}
SINGLE = Strategy(kind="single", param_dtype="fp64", reduce_dtype="fp64", master_dtype="fp64")
# Families that scale their logits, with the factor and other sizes.
SCALED: dict[str, dict[str, Any]] = {
    "granite": {"logits_scaling": 7.0},
    "cohere": {"logit_scale": 0.25},
}


def small(family: str, **changes: Any) -> nn.Module:
    """A model in fp64 with random weights, without dropout."""
    torch.manual_seed(0)
    module: nn.Module = build(reduced(family, **{**SMALL, **changes}), device="cpu").double()
    # Grouped matmuls of experts do not exist in fp64.
    module.config._experts_implementation = "eager"  # type: ignore[union-attr]
    return module.eval()


def scaled(family: str) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        family,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        vocab_size=VOCAB,
        pad_token_id=0,
        **SCALED[family],
    )
    module: nn.Module = transformers.AutoModelForCausalLM.from_config(config).double()
    return module


def chunked(module: nn.Module, chunks: int) -> nn.Module:
    found = copy.deepcopy(module)
    apply_chunked_loss(found, chunks)
    return found


def batch(sequences: int = 3, length: int = 17) -> tuple[Any, Any]:
    """Token ids and targets, of which some are ignored."""
    data = torch.Generator().manual_seed(1)
    ids, targets = torch.randint(1, VOCAB, (2, sequences, length), generator=data)
    targets[0, :5] = -100
    return ids, targets


def gradients(module: nn.Module) -> dict[str, Any]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    """All gradients, relative to the largest: some are zero but for rounding."""
    ours, theirs = gradients(one), gradients(other)
    assert ours.keys() == theirs.keys()
    largest = max(gradient.abs().max() for gradient in theirs.values())
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).abs().max() <= 1e-12 * largest, name


def check(module: nn.Module, chunks: int = 8) -> None:
    ids, targets = batch()
    other = chunked(module, chunks)
    expected = loss_of(module)(ids, targets)
    found = other(input_ids=ids, shift_labels=targets, num_items_in_batch=1).loss
    assert abs(found - expected) <= 1e-12 * expected
    expected.backward()
    found.backward()
    assert_equal(other, module)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_same_loss_and_gradients(family: str) -> None:
    check(small(family))


@pytest.mark.parametrize("family", SCALED)
def test_scaled_logits(family: str) -> None:
    check(scaled(family))


# 51 tokens: a divisor, no divisor, one token a chunk, and more chunks than tokens.
@pytest.mark.parametrize("chunks", [2, 3, 7, 51, 1000])
@pytest.mark.parametrize("tied", [True, False])
def test_any_number_of_chunks(chunks: int, tied: bool) -> None:
    check(small("llama", tied=tied), chunks)


@pytest.mark.parametrize(
    "frozen", [("lm_head",), ("model.",), ("layers.0", "embed"), ("model.", "lm_head")]
)
def test_frozen_parameters(frozen: tuple[str, ...]) -> None:
    module = small("llama", tied=False)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) and frozen[0] not in name)
    if any(parameter.requires_grad for parameter in module.parameters()):
        check(module)
        return
    ids, targets = batch()
    found = chunked(module, 4)(input_ids=ids, shift_labels=targets, num_items_in_batch=1).loss
    assert not found.requires_grad
    torch.testing.assert_close(found, loss_of(module)(ids, targets))


def test_keywords_mean_what_they_mean_in_transformers() -> None:
    module = small("llama")
    other = chunked(module, 4)
    ids, labels = batch()
    # transformers computes its own loss in fp32.
    near: dict[str, float] = {"rtol": 1e-6, "atol": 1e-6}
    for count in (None, 7, torch.tensor(7)):
        expected = module(input_ids=ids, labels=labels, num_items_in_batch=count)
        found = other(input_ids=ids, labels=labels, num_items_in_batch=count)
        torch.testing.assert_close(found.loss, expected.loss, check_dtype=False, **near)
        assert type(found) is type(expected)
        assert found.logits is None
    shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    mean = other(input_ids=ids, shift_labels=shifted).loss
    torch.testing.assert_close(mean, other(input_ids=ids, labels=labels).loss)
    mask = torch.ones_like(ids)
    torch.testing.assert_close(
        other(input_ids=ids, attention_mask=mask, labels=labels).loss, mean, **near
    )


def test_without_labels_a_model_does_what_it_did() -> None:
    module = small("gemma2")
    other = chunked(module, 4)
    ids, targets = batch()
    assert torch.equal(other(input_ids=ids).logits, module(input_ids=ids).logits)
    with torch.no_grad():
        found = other(input_ids=ids, shift_labels=targets, num_items_in_batch=1).loss
        torch.testing.assert_close(found, loss_of(module)(ids, targets))
    assert not found.requires_grad


def test_names_do_not_change() -> None:
    module = small("gpt2")
    other = chunked(module, 4)
    assert list(other.state_dict()) == list(module.state_dict())
    assert [name for name, _ in other.named_modules()] == [n for n, _ in module.named_modules()]
    ids, targets = batch()
    other(input_ids=ids, shift_labels=targets).loss.backward()
    assert list(other.state_dict()) == list(module.state_dict())
    assert "lm_head" not in vars(other)


def test_the_auxiliary_loss_of_experts_is_added_to_that_of_labels() -> None:
    module = small("mixtral")
    other = chunked(module, 4)
    ids, labels = batch()
    expected = module(input_ids=ids, labels=labels, output_router_logits=True)
    found = other(input_ids=ids, labels=labels, output_router_logits=True)
    torch.testing.assert_close(found.aux_loss, expected.aux_loss)
    torch.testing.assert_close(found.loss, expected.loss, check_dtype=False, rtol=1e-6, atol=1e-6)
    assert found.loss > other(input_ids=ids, labels=labels).loss


def test_a_second_backward_pass_is_refused() -> None:
    ids, targets = batch()
    loss = chunked(small("llama"), 4)(input_ids=ids, shift_labels=targets).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass"):
        loss.backward()


class _Casts(TorchDispatchMode):
    """Counts conversions of tensors of one shape to bf16."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16:
            self.count += out.shape == self.shape
        return out


def test_autocast_casts_the_head_once() -> None:
    strategy = Strategy(kind="single", param_dtype="bf16", loss="chunked", loss_chunks=5)
    plain, module = (small("llama", tied=False).float() for _ in range(2))
    module = parallelize(module, strategy)
    plain = parallelize(plain, strategy.but(loss="plain"))
    ids, targets = batch()
    with _Casts((VOCAB, 64)) as casts:
        found = loss_of(module)(ids, targets)
    assert casts.count == 1
    found.backward()
    expected = loss_of(plain)(ids, targets)
    expected.backward()
    assert abs(found - expected) <= 1e-3 * expected
    for name, gradient in gradients(plain).items():
        difference = gradients(module)[name] - gradient
        assert difference.norm() <= 2e-2 * gradient.norm(), name


def test_fp16_does_not_overflow() -> None:
    """The gradients of a sum over this many tokens would: they are kept as those of a mean."""
    module = small("llama", tied=False).half()
    apply_chunked_loss(module, 4)
    ids = torch.ones(8, 512, dtype=torch.long)
    loss = module(input_ids=ids, shift_labels=ids, num_items_in_batch=1e3 * ids.numel()).loss
    loss.backward()
    assert all(gradient.isfinite().all() for gradient in gradients(module).values())


class _Plain(nn.Module):
    """Blocks, but not a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def bert() -> nn.Module:
    """Between its decoder and its last matrix is a layer with parameters of its own."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, is_decoder=True, vocab_size=VOCAB)
    module: nn.Module = transformers.BertLMHeadModel(config)
    return module


def classifier() -> nn.Module:
    config = small("llama").config
    module: nn.Module = transformers.LlamaForSequenceClassification(config)
    return module


@pytest.mark.parametrize("make", [_Plain, bert, classifier])
def test_other_models_are_refused_before_anything_is_changed(make: Any) -> None:
    module = make().double()
    with pytest.raises(SpecError, match=r"^strategy.loss: .*set loss = \"plain\""):
        parallelize(module, SINGLE.but(loss="chunked"))
    assert "forward" not in vars(module)


def test_a_model_that_calls_something_else_is_refused_at_its_first_call() -> None:
    """Its forward does not call the module that get_decoder names."""
    module = small("llama")
    inner = module.model
    module.forward = lambda **inputs: transformers.modeling_outputs.CausalLMOutputWithPast(
        logits=module.lm_head(inner(**inputs).last_hidden_state)  # type: ignore[operator, union-attr]
    )
    apply_chunked_loss(module, 4)
    ids, targets = batch()
    with pytest.raises(SpecError, match=r"^strategy.loss: .*LlamaForCausalLM does not"):
        module(input_ids=ids, shift_labels=targets)
    assert "lm_head" not in vars(module)
