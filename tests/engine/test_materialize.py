"""Models from the meta device: the same weights however they are cut, and nothing left unset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.spec.lookup import ConfigRef, find_config
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from tests.units.reduced import build, reduced

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from shardwise.engine.materialize import Materializer  # noqa: E402
from shardwise.engine.parallelize import parallelize  # noqa: E402
from shardwise.pytorch.blocks import find_blocks  # noqa: E402
from shardwise.pytorch.build import build_module  # noqa: E402
from shardwise.trainer.weights import pretrained_fill  # noqa: E402

CPU = torch.device("cpu")
FAMILIES = (
    "llama",
    "gpt2",
    "qwen3",
    "gemma2",
    "opt",
    "gpt_neox",
    "mpt",
    "mixtral",
    "olmo2",
    "phi3",
)


def weights(model: Any) -> dict[str, Any]:
    return dict(model.named_parameters(remove_duplicate=False))


@pytest.mark.parametrize("family", FAMILIES)
def test_units_of_any_size_start_the_same(family: str) -> None:
    sizes = {"hidden": 64, "heads": 4, "head_dim": 16, "kv_heads": 4, "ffn": 96, "layers": 3}
    spec = reduced(family, **sizes)
    whole, cut = build(spec), build(spec)
    Materializer(whole, CPU, torch.float32, seed=3).unit([whole])
    pieces = Materializer(cut, CPU, torch.float32, seed=3)
    for block in find_blocks(cut).values():
        pieces.unit([block])
    pieces.unit([cut])
    one, other = weights(whole), weights(cut)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert whole(input_ids=torch.zeros((1, 8), dtype=torch.long)).logits.isfinite().all()


def test_the_distribution_is_the_models_own() -> None:
    spec = reduced("gpt2", hidden=256, layers=4)
    model = build(spec)
    Materializer(model, CPU, torch.float32).unit([model])
    usual, residual = 0.02, 0.02 / (2 * 4) ** 0.5  # GPT-2 scales what feeds the residual stream
    block = model.transformer.h[1]
    assert block.mlp.c_fc.weight.std().item() == pytest.approx(usual, rel=0.02)
    assert block.mlp.c_proj.weight.std().item() == pytest.approx(residual, rel=0.02)
    assert (block.ln_1.weight == 1).all()
    # Different modules draw different numbers.
    assert not torch.equal(block.mlp.c_fc.weight, model.transformer.h[2].mlp.c_fc.weight)


def test_tied_weights_stay_one_tensor() -> None:
    model = build(reduced("gpt2", hidden=64, heads=4, head_dim=16, kv_heads=4, ffn=128))
    parallelize(model, Strategy(kind="single", param_dtype="fp32"))
    assert model.lm_head.weight is model.transformer.wte.weight


class Forgetful(nn.Module):
    """Has a parameter that no initialisation sets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(8))


def test_what_stays_unset_is_named() -> None:
    with torch.device("meta"):
        model = Forgetful()
    with pytest.raises(SpecError, match="scale stayed uninitialised; give its module"):
        parallelize(model, Strategy(kind="single", param_dtype="fp32"))


def test_a_dtype_that_was_not_declared() -> None:
    with pytest.raises(SpecError, match="keeps parameters in torch.float32; convert the model"):
        parallelize(Forgetful().bfloat16(), Strategy(kind="single"))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_pretrained_weights_are_those_of_the_folder(family: str, tmp_path: Path) -> None:
    spec = reduced(family, hidden=64, heads=4, head_dim=16, kv_heads=4, ffn=96)
    original = build(spec, device="cpu")
    original.save_pretrained(tmp_path, max_shard_size="100KB")
    model = find_config(str(tmp_path)).but(pretrained=True)
    with torch.device("meta"):
        loaded = build_module(model)
    Materializer(loaded, CPU, torch.float32, pretrained_fill(loaded, tmp_path)).unit([loaded])
    one, other = weights(original), weights(loaded)
    assert all(torch.equal(one[name], other[name]) for name in one)
    ids = torch.arange(12)[None]
    assert torch.equal(original.eval()(ids).logits, loaded.eval()(ids).logits)

    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    lost = next(name for name in index["weight_map"] if "1" in name)
    del index["weight_map"][lost]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with torch.device("meta"):
        broken = build_module(model)
    with pytest.raises(SpecError, match="stayed uninitialised"):
        Materializer(broken, CPU, torch.float32, pretrained_fill(broken, tmp_path)).unit([broken])


def test_any_model_type_of_transformers(tmp_path: Path) -> None:
    """One without formulas is traced, and trains like the others."""
    from transformers import AutoConfig

    from shardwise.units.load import load_units

    config = AutoConfig.for_model(
        "stablelm", hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, vocab_size=128,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    model = find_config(str(tmp_path))
    assert isinstance(model, ConfigRef)
    with torch.device("meta"):
        module = build_module(model)
    units = load_units(model, 32, Strategy(kind="single", param_dtype="fp32"))
    assert units.numel == sum(p.numel() for p in module.parameters())
    ready = parallelize(module, Strategy(kind="single", param_dtype="fp32"))
    assert ready(input_ids=torch.zeros((1, 8), dtype=torch.long)).logits.isfinite().all()
