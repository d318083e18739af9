# A slow run of torchtitan, with a trace of each of its eight ranks.
# Pages: README.md docs/how-to/coding-assistants.md examples/skills/shardwise/reference/slow.md
# Data: traces/megatron_tp8_8rank

# As torchtitan leaves them: a folder for each profiled step.
mkdir -p outputs/profile_traces/iteration_9 outputs/profile_traces/iteration_10
for rank in 0 1 2 3 4 5 6 7; do
  cp "$DATA/rank$rank.json.gz" "outputs/profile_traces/iteration_10/rank${rank}_trace.json.gz"
done
shardwise trace outputs/profile_traces | tee verdict.txt
grep -q "Stragglers: ranks 0 and 6" verdict.txt || fail "the stragglers are others"

# And what the configuration could be.
shardwise examples
shardwise import examples/stacks/torchtitan.toml --cluster 8xH100-SXM -o mine.toml
shardwise plan mine.toml --for torchtitan -o best.toml
