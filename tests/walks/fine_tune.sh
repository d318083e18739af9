# Someone who fine-tunes a small local Hugging Face model, and hands the plan to accelerate.
# Pages: README.md docs/how-to/fine-tune.md
# Packages: accelerate

# What such a person has: a model folder, a tokenizer, a text, and a script for accelerate.
python "$WALKS/have_model.py" my-model text.txt
cp "$WALKS/have_script.py" train.py

shardwise plan --model my-model --cluster 8xH100-SXM --seq-len 4096 --global-batch 256Ki -o run.toml
save_block docs/how-to/fine-tune.md toml 1 > run.toml
shardwise train run.toml --name tuned
shardwise export-weights runs/tuned -o tuned
python - <<'END'
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("tuned")
assert sum(p.numel() for p in model.parameters()) > 0
END

shardwise plan --model my-model --cluster 8xH100-SXM --seq-len 4096 --global-batch 256Ki \
  --for accelerate -o for-accelerate.toml
shardwise export run.toml --to accelerate -o accelerate.yaml 2> how.txt
cat how.txt
grep -q -e "--config_file accelerate.yaml" how.txt || fail "the start command names another file"
accelerate launch --config_file accelerate.yaml train.py
