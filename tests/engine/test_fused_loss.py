"""The fused loss: what it finds behind a decoder, and what is refused; its kernels need CUDA."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from shardwise.engine.fused_loss import _FusedLoss, apply_fused_loss  # noqa: E402
from shardwise.engine.parallelize import parallelize  # noqa: E402
from shardwise.spec.fused_loss import PACKAGES, check_fused_loss  # noqa: E402
from shardwise.spec.record import SpecError  # noqa: E402
from shardwise.spec.strategy import Strategy  # noqa: E402

FUSED = Strategy(kind="single", loss="fused")
KERNELS = ("liger", "cut_cross_entropy")


def small(family: str, **settings: Any) -> Any:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    config = transformers.AutoConfig.for_model(
        family, hidden_size=64, num_hidden_layers=2, vocab_size=203, pad_token_id=0, **sizes,
        **settings,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("family", "settings", "cap"),
    [
        ("llama", {}, None),
        ("qwen2", {"tie_word_embeddings": True}, None),
        ("gemma2", {"final_logit_softcapping": 5.0}, 5.0),
        ("gemma2", {"final_logit_softcapping": None}, None),
    ],
)
def test_the_soft_cap_is_found(family: str, settings: dict[str, Any], cap: float | None) -> None:
    loss = _FusedLoss(small(family, **settings), "liger")
    _, hidden = loss._without_head(input_ids=torch.randint(1, 203, (1, 8)))
    assert loss._find_softcap(hidden) == cap


@pytest.mark.parametrize(
    ("family", "settings"),
    [("granite", {"logits_scaling": 3.0}), ("cohere", {"logit_scale": 0.25})],
)
def test_scaled_logits_are_refused_at_the_first_call(family: str, settings: dict[str, Any]) -> None:
    model = small(family, **settings)
    apply_fused_loss(model, "liger")
    ids = torch.randint(1, 203, (1, 8))
    with pytest.raises(SpecError, match=r"^strategy.loss: .* scales .*; set loss = \"chunked\"$"):
        model(input_ids=ids, labels=ids)


def test_a_head_with_a_bias_is_refused_by_cut_cross_entropy() -> None:
    config = transformers.PhiConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=203
    )
    with pytest.raises(SpecError, match=r"^strategy.loss: fused needs .* set loss = \"plain\"$"):
        apply_fused_loss(transformers.PhiForCausalLM(config), "cut_cross_entropy")


@pytest.mark.parametrize("kernel", KERNELS)
def test_cpus_are_refused_before_anything_is_changed(kernel: str) -> None:
    model = small("llama")
    with pytest.raises(SpecError, match=r"^strategy.loss: .* run on GPUs only; "):
        parallelize(model, FUSED.but(loss_kernel=kernel))
    assert "forward" not in vars(model)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_missing_package_is_named(kernel: str) -> None:
    """These packages need Triton and are not installed for tests."""
    if find_spec(PACKAGES[kernel][1]) is not None:  # type: ignore[index]
        pytest.skip(f"{kernel} is installed")
    strategy = FUSED.but(loss_kernel=kernel)
    name = kernel.replace("_", "-") if kernel != "liger" else "liger-kernel"
    with pytest.raises(SpecError, match=rf"needs {name}, .*: pip install {name}, or set loss = "):
        check_fused_loss(strategy, "cuda")
    check_fused_loss(strategy.but(loss="chunked"), "cpu")
