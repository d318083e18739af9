"""What `doctor` says about models of which only a part is trained."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")
import peft
import torch
from torch import nn

from shardwise.spec.adapter import Adapter
from shardwise.spec.lookup import ModuleRef
from shardwise.trainer.data.batches import Layout, SyntheticBatches
from shardwise.trials.doctor.adapter_checks import adapter_checks
from tests.units.reduced import build, reduced

SPEC = reduced("llama", layers=2, hidden=64, heads=4, head_dim=16, ffn=96, vocab=101)
BATCH = SyntheticBatches(Layout(0, 1, 2, 1, 16), 101, 0).at(0)[0]


def adapted() -> Any:
    """As users build one: peft wraps a transformers model."""
    device = torch.empty(0).device
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(build(SPEC, device=str(device)), config)


def sound() -> nn.Module:
    model: nn.Module = adapted()
    return model


def trains_its_base() -> nn.Module:
    model: nn.Module = adapted()
    return model.requires_grad_(True)


def mixes_dtypes() -> nn.Module:
    model: nn.Module = adapted()
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


def reentrant() -> nn.Module:
    model = adapted()
    model.base_model.model.gradient_checkpointing_enable({"use_reentrant": True})
    # transformers makes the embedding's output need a gradient; here nothing does.
    model.base_model.model.disable_input_require_grads()
    embedding = model.get_input_embeddings()
    embedding._forward_hooks.clear()
    result: nn.Module = model
    return result


def failed(factory: str) -> dict[str, str]:
    checks = list(adapter_checks(ModuleRef(factory=f"{__name__}:{factory}"), BATCH))
    assert [check.name for check in checks] == [
        "base frozen",
        "one trained dtype per unit",
        "trained parameters get gradients",
    ]
    return {check.name: check.detail for check in checks if not check.passed}


def test_a_sound_module_of_peft() -> None:
    assert failed("sound") == {}


@pytest.mark.parametrize(
    ("factory", "name", "word"),
    [
        ("trains_its_base", "base frozen", "requires_grad"),
        ("mixes_dtypes", "one trained dtype per unit", "lora_B"),
        ("reentrant", "trained parameters get gradients", "use_reentrant=False"),
    ],
)
def test_what_is_wrong_is_named(factory: str, name: str, word: str) -> None:
    found = failed(factory)
    assert found.keys() == {name}
    assert word in found[name]


@pytest.mark.parametrize(
    "adapter", [Adapter(rank=4), Adapter(rank=4, dropout=0.1, train=("lm_head",), base="nf4")]
)
def test_adapters_of_a_run(adapter: Adapter) -> None:
    checks = list(adapter_checks(SPEC.but(adapter=adapter), BATCH))
    assert all(check.passed for check in checks)
    assert len(checks) == 3


def test_a_model_that_is_trained_as_a_whole_has_nothing_to_check() -> None:
    assert list(adapter_checks(SPEC, BATCH)) == []
