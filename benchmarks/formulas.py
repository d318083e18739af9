"""Errors of the FLOP and memory formulas for each model family.

    python -m benchmarks.formulas [--json]

FLOPs are compared with torch.utils.flop_counter (the largest error of none, selective and full
recompute). Bytes that a block saves for its backward pass, by formula and by trace, are compared
with saved_tensors_hooks.
"""

from __future__ import annotations

import argparse
import json
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from shardwise.units.decoder import decoder_units
from shardwise.units.module import module_units
from tests.units import test_flops, test_saved_bytes
from tests.units.reduced import build, reduced


def flops_errors() -> dict[str, dict[str, float]]:
    """Largest error in percent, forward and forward + backward."""
    found = {}
    for family in test_flops.FAMILIES:
        spec = reduced(family)
        worst = [0.0, 0.0]
        for recompute in ("none", "selective", "full"):
            pairs = zip(
                test_flops.predicted(spec, recompute),
                test_flops.counted(spec, recompute),
                strict=True,
            )
            for index, (ours, theirs) in enumerate(pairs):
                worst[index] = max(worst[index], abs(ours / theirs - 1) * 100)
        found[family] = {"forward": worst[0], "forward_backward": worst[1]}
    return found


def saved_errors() -> dict[str, dict[str, float]]:
    """Error in percent of the bytes a block saves, by dtype, recompute policy and method."""
    found: dict[str, dict[str, float]] = {}
    seq_len = test_saved_bytes.SEQ
    for family in test_saved_bytes.FAMILIES:
        spec = reduced(family)
        errors = found.setdefault(family, {})
        for dtype in ("fp32", "bf16"):
            formula = decoder_units(spec, seq_len, dtype).blocks[1].stage
            traced = module_units(build(spec, attention="sdpa"), seq_len, dtype).blocks[1].stage
            for policy in ("none", "full"):
                real = test_saved_bytes.really_saved(spec, dtype, policy)[1]
                for name, stage in (("formula", formula), ("trace", traced)):
                    kept = stage.kept[policy].activation_bytes
                    errors[f"{dtype} {policy} {name}"] = (kept / real - 1) * 100
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {"flops": flops_errors(), "saved_bytes": saved_errors()}
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for title, families in found.items():
        print(f"{title}, error in percent")
        for family, errors in families.items():
            print(f"  {family:10}", "  ".join(f"{k} {v:+.2f}" for k, v in errors.items()))


if __name__ == "__main__":
    main()
