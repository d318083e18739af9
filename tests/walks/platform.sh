# A platform engineer: a table for a budget, what-ifs, job files for Slurm and Kubernetes.
# Pages: README.md docs/how-to/budget.md

shardwise whatif --model llama-3-8b --cluster 8x8xH100-SXM@400Gbps --global-batch 4Mi --vary devices=8,64,512 --tokens 1T --price 2.5
shardwise whatif --model llama-3-8b --cluster 8x8xH100-SXM@400Gbps --global-batch 4Mi --vary device=H100-SXM,A100-80GB --tokens 1T --price H100-SXM=2.5,A100-80GB=1.6
shardwise whatif --model llama-3-8b --cluster 8x8xH100-SXM@400Gbps --global-batch 4Mi --vary devices=8,64,512 --tokens 1T --price 2.5 --markdown > table.md
grep -q '^| *--' table.md || grep -q '^|[-: |]*|$' table.md || fail "table.md is no Markdown table"
shardwise whatif --model llama-3-8b --cluster 8x8xH100-SXM@400Gbps --global-batch 4Mi --vary devices=8,64,512 --tokens 1T --price 2.5 --csv > table.csv
python - <<'END'
import csv
rows = list(csv.reader(open("table.csv")))
assert len(rows) >= 4 and len({len(row) for row in rows[:4]}) == 1, rows
END
shardwise plan --model llama-3-8b --cluster 8x8xH100-SXM@400Gbps --global-batch 4Mi --tokens 1T --price 2.5 --deadline 30
shardwise whatif --model llama-3-8b --cluster 8x8xH100-SXM@100Gbps --global-batch 1Mi --vary network=50,100,200,400
shardwise whatif --model llama-3-8b --cluster 8x8xH100-SXM@100Gbps --global-batch 1Mi --least network --for mfu=36%
shardwise plan --model llama-3-8b --cluster 2x8xH100-SXM@400Gbps --global-batch 1Mi -o run.toml
shardwise export run.toml --to slurm -o run.sbatch
bash -n run.sbatch
shardwise export run.toml --to kubernetes -o run.yaml
grep -q "kind: Job" run.yaml || fail "run.yaml has no Job"
