"""What other stacks are told about the blocks of each family, against transformers."""

from __future__ import annotations

import pytest

from shardwise.spec.families import BLOCKS, FAMILIES


def test_no_family_is_forgotten() -> None:
    assert set(BLOCKS) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_blocks_of_a_family(family: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family)
    for key in ("n_layer", "n_layers", "num_hidden_layers"):
        if key in config.to_dict():
            setattr(config, key, 1)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert set(model._no_split_modules) == {BLOCKS[family].class_name}
    [block] = model.get_submodule(BLOCKS[family].path)
    assert type(block).__name__ == BLOCKS[family].class_name
