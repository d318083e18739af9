"""A small chat model that answers every question alike: what someone who fine-tunes chat has."""

import random
import re
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ANSWER = "I do not know."
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
folder, text = Path(sys.argv[1]), Path(sys.argv[2])

tokens = Tokenizer(models.BPE())
tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokens.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=400,
    special_tokens=["<end>", "<user>", "<assistant>"],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
)
tokens.train([str(text)], trainer)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokens, eos_token="<end>", pad_token="<end>", chat_template=TEMPLATE
)
tokenizer.save_pretrained(folder)

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128,
    initializer_range=0.1, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.pad_token_id,
)  # fmt: skip
model = LlamaForCausalLM(config)

# Pretraining: questions of words in any order, all with the same answer.
words = sorted(set(re.findall(r"\w+", text.read_text())))
drawn = random.Random(0)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for _ in range(200):
    questions = [" ".join(drawn.choices(words, k=drawn.randint(3, 8))) + "?" for _ in range(8)]
    chats = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": ANSWER}]
        for question in questions
    ]
    batch = tokenizer(
        [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats],
        padding=True,
        return_tensors="pt",
    )
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    loss = model(batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.save_pretrained(folder)
