# Someone with a module and a loop of their own: predict it, shard it, kill it, resume it.
# Pages: README.md docs/how-to/own-loop.md

# What such a person has: a module.
cat > mine.py <<'END'
from torch import nn

def build():
    blocks = [nn.TransformerEncoderLayer(1024, 16, 4096, 0.0, batch_first=True) for _ in range(24)]
    return nn.Sequential(nn.Embedding(32000, 1024), nn.Sequential(*blocks), nn.Linear(1024, 32000))
END
shardwise estimate --model mine:build --cluster 8xH100-SXM

save_block docs/how-to/own-loop.md python 4 > own_loop.py
torchrun --nproc-per-node 2 own_loop.py
mv checkpoints undisturbed

# Kill it after its second save, and start it again.
torchrun --nproc-per-node 2 own_loop.py &
while [ ! -e checkpoints/step-20/.metadata ]; do sleep 0.1; done
pkill --signal KILL --full own_loop.py || fail "it ended before it was killed"
wait || true
[ ! -e checkpoints/step-40 ] || fail "it ended before it was killed"
torchrun --nproc-per-node 2 own_loop.py | tee resumed.txt
if grep -q "step 10:" resumed.txt; then fail "it started from the beginning"; fi

python - <<'END'
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

states = []
for folder in ("undisturbed", "checkpoints"):
    dcp_to_torch_save(f"{folder}/step-40", f"{folder}.pt")
    states.append(torch.load(f"{folder}.pt", weights_only=True)["model"])
assert states[0].keys() == states[1].keys()
assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
END
shardwise fsck checkpoints/step-40
