# Three jobs that people come with, each in one or two commands: an 8B model on eight RTX 4090, a LoRA
# of TRL that runs out of memory, and the cost of 70B on a trillion tokens.
# Pages: README.md docs/how-to/coding-assistants.md examples/skills/shardwise/reference/choose.md examples/skills/shardwise/reference/mend.md examples/skills/shardwise/reference/cost.md

# Full training does not fit; the screen names what does, and that is so.
if shardwise plan --model llama-3-8b --cluster 8xRTX-4090 > consumer.txt; then fail "it fits"; fi
cat consumer.txt
for option in "--adapter lora:16" "--offload" "--optimizer adamw-8bit"; do
  grep -q -e "$option" consumer.txt || fail "the screen does not name $option"
done
shardwise plan --model llama-3-8b --cluster 8xRTX-4090 --optimizer adamw-8bit

# The script loads 8B parameters in fp32: 30 GiB of 40. In bf16 it fits, with room.
shardwise examples
shardwise import examples/stacks/trl_lora.py --cluster 1xA100-40GB -o run.toml
if shardwise estimate run.toml > needs.txt; then fail "it fits"; fi
grep -q "Largest term: parameters" needs.txt || fail "another term is the largest"
shardwise plan run.toml --for trl --adapter lora:16 -o best.toml
shardwise export best.toml --to trl --against examples/stacks/trl_lora.py | tee edits.txt
grep -q "model_init_kwargs.dtype: bfloat16" edits.txt || fail "the dtype is not to be edited"

# Tokens, devices and money agree: 1T tokens x 6 x 70B FLOPs at the MFU that is printed.
shardwise whatif --model llama-3-70b --cluster 64x8xH100-SXM@400Gbps --global-batch 4Mi --vary devices=256,512,1024 --tokens 1T --price 2.5
shardwise whatif --model llama-3-70b --cluster 64x8xH100-SXM@400Gbps --global-batch 4Mi --vary devices=256,512,1024 --tokens 1T --price 2.5 --json > cost.json
python - <<'END'
import json
(study,) = json.load(open("cost.json"))["studies"]
for point, devices in zip(study["points"], (256, 512, 1024), strict=True):
    # The FLOPs of attention come on top of six per parameter and token: a few percent.
    by_hand = 6 * 70.55e9 * point["tokens_per_s"] / (devices * 989e12)
    assert 0.9 < by_hand / point["mfu"] < 1.0, (devices, by_hand, point["mfu"])
END
