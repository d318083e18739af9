"""Trace the models of the catalogue that have no formulas, and keep the traces.

    python -m benchmarks.traces [NAME ...]

Reads `src/shardwise/spec/catalogue/traced/NAME/config.json` and writes `trace.json` beside it, with
transformers as installed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from shardwise.pytorch.from_config import model_from_config
from shardwise.spec.catalogue import traced
from shardwise.spec.dtype import DType
from shardwise.spec.huggingface import longest_sequence
from shardwise.units.kept_trace import trace_table, without_superfluous
from shardwise.units.module import module_units

FOLDER = Path(traced.__file__).parent
# Between two of them, and the model's windows, all quantities are linear.
LENGTHS = (256, 1024, 4096, 16384, 32768)
# Relative error up to which a length is left out because its neighbours give it.
TOLERANCE = 1e-5
VARIANTS: dict[str, tuple[DType, bool]] = {"bf16": ("bf16", False), "bf16+autocast": ("bf16", True)}


def kept(name: str) -> dict[str, Any]:
    """The trace of a model at all lengths that it has, in all variants."""
    config = json.loads(traced.config_file(name).read_text())
    with torch.device("meta"):
        module: Any = model_from_config(config, name)
    lengths = lengths_of(config, module)
    traces = {}
    for variant, (dtype, autocast) in VARIANTS.items():
        units = [module_units(module, n, dtype, autocast=autocast, name=name) for n in lengths]
        traces[variant] = without_superfluous(trace_table(units), TOLERANCE)
    return {
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "differs": traced.relevant(config),
        "values": completed(traced.relevant(module.config.to_dict()), traced.relevant(config)),
        "traces": traces,
    }


def completed(values: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Values of a class, with keys of a published file that the class turns into others.

    Qwen3-Next's `full_attention_interval` becomes a list of layers, for example.
    """
    own = {key: value for key, value in config.items() if key not in values}
    parts = {
        key: completed(value, config[key])
        for key, value in values.items()
        if isinstance(value, dict) and isinstance(config.get(key), dict)
    }
    return {**values, **parts, **own}


def lengths_of(config: dict[str, Any], module: Any) -> list[int]:
    """The lengths to trace a model at."""
    longest = longest_sequence(config)
    if module.main_input_name != "input_ids":
        # An image has one length; a text beside sound is traced at its longest alone.
        return [longest or LENGTHS[0]]
    # A window at which every length is seen in full needs no length of its own.
    text = module.config.get_text_config()
    windows = (getattr(text, key, None) for key in ("sliding_window", "local_attention"))
    lengths = {*LENGTHS, *(window for window in windows if window)}
    most = min(longest or LENGTHS[-1], LENGTHS[-1])
    return sorted({most, *(n for n in lengths if n <= most)})


def main(names: list[str]) -> None:
    for name in names or sorted(path.parent.name for path in FOLDER.glob("*/config.json")):
        table = kept(name)
        text = json.dumps(table, separators=(",", ":"))
        (FOLDER / name / "trace.json").write_text(text + "\n")
        points = {k: [a["seq_len"] for a in v["at"]] for k, v in table["traces"].items()}
        print(f"{name}: {len(text) / 1024:.0f} KiB, {points}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
