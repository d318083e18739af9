"""Suggestions for misspelled names."""

from __future__ import annotations

import pytest

from shardwise.spec import catalogue
from shardwise.spec.strategy import Strategy
from shardwise.spec.suggest import MOST_SUGGESTIONS, suggestions

# What a person who types the left side means: one of the names on the right comes first.
DEVICES = {
    "A100": {"A100-40GB", "A100-80GB"},
    "A100-SXM": {"A100-40GB", "A100-80GB"},
    "A100-80G": {"A100-80GB"},
    "A100_80GB": {"A100-80GB"},
    "A100-SXM4-80GB": {"A100-80GB"},
    "H100": {"H100-SXM"},
    "H100-80GB": {"H100-SXM"},
    "H100SXM": {"H100-SXM"},
    "h100-sxm5": {"H100-SXM"},
    "H100-NVL": {"H100-SXM", "H100-PCIe"},
    "NVIDIA-H100": {"H100-SXM"},
    "H10-SXM": {"H100-SXM"},
    "H200": {"H200-SXM"},
    "RTX4090": {"RTX-4090"},
    "4090": {"RTX-4090"},
    "rtx-4085": {"RTX-4080", "RTX-4090"},
    "RTX-4070": {"RTX-4070-Ti-SUPER"},
    "RTX-A600": {"RTX-A6000"},
    "RTX-6000": {"RTX-6000-Ada"},
    "H800": {"H800-SXM"},
    "P100": {"P100-PCIe-16GB"},
    "V100": {"V100-SXM2-16GB", "V100-SXM2-32GB"},
    "V100-32GB": {"V100-SXM2-32GB"},
    "MI300": {"MI300X"},
    "L40": {"L40S"},
    "A10": {"A10G"},
    "H10": {"H100-SXM"},
    "H1000": {"H100-SXM"},
    "H1000x8": {"H100-SXM"},
    "H2000": {"H200-SXM"},
    "A1000": {"A100-40GB", "A100-80GB"},
    "A100SXM": {"A100-40GB", "A100-80GB"},
    "V1000": {"V100-SXM2-16GB", "V100-SXM2-32GB"},
}
MODELS = {
    "llama3-8b": {"llama-3-8b"},
    "llama-3-8B-instruct": {"llama-3-8b"},
    "lama-3-8b": {"llama-3-8b"},
    "llama-3.1": {"llama-3.1-8b"},
    "gpt-2": {"gpt2"},
    "gpt2-small": {"gpt2"},
    "mixtral": {"mixtral-8x7b"},
    "Mistral-7B-v0.1": {"mistral-7b"},
    "qwen-2.5-7b": {"qwen2.5-7b"},
    "Qwen3-8B-Base": {"qwen3-8b"},
    "gemma3-27b": {"gemma-3-27b"},
    "phi4": {"phi-4"},
    "pythia": {"pythia-1.4b"},
    "mixtrl": {"mixtral-8x7b"},
    "gpt2small": {"gpt2"},
    "meta-llama/Llama-3.1-8B": {"llama-3.1-8b"},
    "meta-llama/Meta-Llama-3-8B": {"llama-3-8b"},
    "Qwen/Qwen2.5-7B-Instruct": {"qwen2.5-7b"},
}
FIELDS = {
    "recompte": {"recompute"},
    "micro_batch_size": {"micro_batch"},
    "reshard_after_forwrad": {"reshard_after_forward"},
    "batch": {"micro_batch"},
}


@pytest.mark.parametrize(
    ("word", "meant", "known"),
    [
        *((word, meant, list(catalogue.devices())) for word, meant in DEVICES.items()),
        *((word, meant, catalogue.model_names()) for word, meant in MODELS.items()),
        *((word, meant, list(Strategy.model_fields)) for word, meant in FIELDS.items()),
    ],
)
def test_the_first_suggestion_is_what_was_meant(
    word: str, meant: set[str], known: list[str]
) -> None:
    found = suggestions(word, known)
    assert found
    assert found[0] in meant
    assert len(found) <= MOST_SUGGESTIONS


@pytest.mark.parametrize("word", ["A100", "A100-SXM", "A1000"])
def test_all_variants_of_a_device_are_offered(word: str) -> None:
    assert {"A100-40GB", "A100-80GB"} <= set(suggestions(word, catalogue.devices()))


@pytest.mark.parametrize("word", ["", "?", "K80", "TPU-v5", "A30", "Z1000", "banana"])
def test_nothing_is_offered_where_nothing_is_near(word: str) -> None:
    assert suggestions(word, catalogue.devices()) == []


@pytest.mark.parametrize("word", ["gpt-oss-20b", "openai/gpt-oss-120b", "GPT-J-6B"])
def test_another_line_of_a_family_is_not_suggested(word: str) -> None:
    assert suggestions(word, catalogue.model_names()) == []


@pytest.mark.parametrize(
    ("word", "first"),
    [
        ("gpt-neo-20b", "gpt-neox-20b"),
        ("mistral-small-24b", "mistral-7b"),
        ("phi-3-small", "phi-2"),
    ],
)
def test_the_rest_of_a_family_still_is(word: str, first: str) -> None:
    assert suggestions(word, catalogue.model_names())[0] == first
