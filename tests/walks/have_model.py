"""A small pretrained model with its tokenizer, and a text: what someone who fine-tunes has."""

import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

folder, text = Path(sys.argv[1]), Path(sys.argv[2])
sentences = [f"{n} times {m} is {n * m}." for n in range(60) for m in range(60)]
text.write_text("\n".join(sentences))

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
tokenizer.decoder = decoders.ByteLevel()
tokenizer.train([str(text)], trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"]))
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)

config = LlamaConfig(
    vocab_size=tokenizer.get_vocab_size(), hidden_size=64, intermediate_size=128,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128,
)  # fmt: skip
LlamaForCausalLM(config).save_pretrained(folder)
