# A student, from README through the tutorial, on a machine with two cores.
# Pages: README.md docs/tutorial/ten-minutes.md

shardwise plan --model llama-3-8b --cluster 2x8xH100-SXM@400Gbps
save_block README.md toml 1 > run.toml
shardwise train run.toml --name first
shardwise train run.toml --profile 3 --name look
shardwise trace runs/look

# The loss falls visibly: a student sees that something was learned.
python - <<'END'
import json
lines = [json.loads(line) for line in open("runs/first/metrics.jsonl")]
assert lines[-1]["loss"] < 0.7 * lines[0]["loss"], (lines[0]["loss"], lines[-1]["loss"])
END

mkdir tutorial && cd tutorial
shardwise calibrate --force -o cluster.toml  # the machine may be busy
save_block docs/tutorial/ten-minutes.md toml 1 > run.toml
shardwise plan run.toml
shardwise train run.toml --name first
shardwise train run.toml --profile 3 --name look --profile-memory
shardwise trace runs/look
shardwise report runs/look -o report.html
grep -q "<html" report.html || fail "report.html is no page"
python - <<'END'
import json
lines = [json.loads(line) for line in open("runs/first/metrics.jsonl")]
assert lines[-1]["loss"] < 0.7 * lines[0]["loss"], (lines[0]["loss"], lines[-1]["loss"])
END
