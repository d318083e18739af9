"""A checkpoint of a tiny Llama and its tokenizer, as a folder that transformers loads."""

from __future__ import annotations

from pathlib import Path


def save_tiny_llama(folder: Path) -> None:
    """Two layers of width 32; words are letters."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(WordLevel({word: at for at, word in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>"
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
