# Someone who fine-tunes a chat model with LoRA: from the question to an answer that was learned.
# Pages: README.md docs/how-to/lora.md
# Packages: peft torchao

# What such a person has: the page's examples, and a chat model that does not know the answers.
save_block docs/how-to/lora.md text 3 > chat.jsonl
python "$WALKS/have_chat_model.py" my-model chat.jsonl

shardwise plan --model my-model --cluster 1xA100-80GB --adapter lora:16 --seq-len 128 -o run.toml
save_block docs/how-to/lora.md toml 1 > run.toml
shardwise train run.toml --name tuned
shardwise export-weights runs/tuned -o adapter
shardwise export-weights runs/tuned -o merged --merge

# The page's script prints what the page shows.
save_block docs/how-to/lora.md py 1 > ask.py
python ask.py | tee said.txt
save_block docs/how-to/lora.md text 4 | diff - said.txt || fail "other answers than the page shows"

# Every answer was learned, by heart; the base model knew none, and what is loaded is the adapter.
python - <<'END_OF_CHECK'
import json
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("my-model")
examples = [json.loads(line) for line in open("chat.jsonl")]
assert len(examples) == 6, examples


def answers(model):
    said = []
    for example in examples:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": example["prompt"]}],
            add_generation_prompt=True, return_dict=True, return_tensors="pt",
        )
        tokens = model.generate(**prompt, max_new_tokens=30, do_sample=False)
        begin = prompt["input_ids"].shape[1]
        said.append(tokenizer.decode(tokens[0, begin:], skip_special_tokens=True))
    return said


base = AutoModelForCausalLM.from_pretrained("my-model")
before = answers(base)
adapted = answers(PeftModel.from_pretrained(base, "adapter"))
merged = answers(AutoModelForCausalLM.from_pretrained("merged"))
for example, one, other in zip(examples, before, adapted):
    print(f"{example['prompt']}  before: {one}  after: {other}")
wanted = [example["completion"] for example in examples]
assert not set(before) & set(wanted), before
assert adapted == wanted, adapted
assert merged == wanted, merged
END_OF_CHECK
