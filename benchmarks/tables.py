"""Write the tables of benchmarks/data from the measured runs that lie beside the project.

    python -m benchmarks.tables ../shared/validation

Of each table the columns that benchmarks read, and its source; remarks of others stay where they
are. Rows, splits and figures are as they were found. benchmarks/data/README.md says what is inside.
"""

from __future__ import annotations

import argparse
import csv
import re
from pathlib import Path

from benchmarks.validation import FOLDER

Rows = list[dict[str, str]]

# Columns of each table, by its path without the ending.
COLUMNS: dict[str, tuple[str, ...]] = {
    "measured_runs": (
        *("id", "source", "split", "mem_split", "strategy", "gpu", "gpus_total", "gpus_per_node"),
        *("inter_node_gbps_per_gpu", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff"),
        *("mlp", "vocab", "tied_embeddings", "seq_len", "precision", "master_dtype"),
        *("allgather_dtype", "reduce_dtype", "grad_sync", "shard_group_size", "activation_ckpt"),
        *("torch_compile", "micro_batch", "grad_accum", "tokens_per_s_per_gpu", "mfu_pct"),
        *("hfu_pct", "peak_mem_gib", "mem_kind"),
    ),
    "did_not_fit": (
        *("model", "n_layers", "d_model", "n_heads", "d_ff", "vocab", "tied", "seq_len", "gpu"),
        *("gpus_total", "zero_stage", "micro_batch", "grad_accum", "status", "source"),
    ),
    "collective_bandwidth_h100": (
        *("nodes", "allreduce_GBps", "allgather_GBps", "reducescatter_GBps", "source"),
    ),
    "multidim/nanotron": (
        *("id", "n_layers", "d_model", "n_heads", "d_ff", "tied", "nodes", "mbs", "grad_accum"),
        *("pp", "tp", "zero", "status", "tokens_per_s", "gpu_memory_gb", "split", "batch_is_256"),
    ),
    "multidim/simumax_b200": (
        *("source", "case", "model", "layers_kept", "tp", "cp", "pp", "seq", "micro_batches"),
        "real_step_ms",
    ),
    "multidim/torch_native_multidim": (
        *("source", "framework", "model", "gpu", "gpus", "tp", "pp", "cp", "ep", "async_tp"),
        *("seq_len", "local_batch", "recompute", "compile", "precision", "lora", "loss"),
        *("tokens_per_s_per_gpu", "step_time_s", "peak_mem_gib"),
    ),
    "multidim/automodel": (
        *("source", "kind", "system", "Model", "#GPUs", "GBS", "MBS", "LBS", "GA", "Seq Length"),
        *("TP", "PP", "CP", "EP", "Kernel Optimizations", "Time per Global Step (s)"),
        "Tokens/sec/GPU",
    ),
    "multidim/megatron_bridge": (
        *("source", "container", "kind", "model", "system", "gpus", "precision", "gbs", "mbs"),
        *("seq_len", "tp", "pp", "cp", "ep", "tokens_per_s_per_gpu"),
    ),
    "multidim/nemo": (
        *("source", "kind", "model", "gpus", "precision", "tp", "pp", "cp"),
        "tokens_per_s_per_gpu",
    ),
    "multidim/published_2026": (
        *("split", "id", "source", "url_or_path", "framework", "model", "gpu", "gpu_mem", "gpus"),
        *("gpus_per_node", "tp", "cp", "pp", "vp", "ep", "dp", "mbs", "gbs", "seq", "precision"),
        *("step_time_s", "tokens_per_s_per_gpu", "tflops", "peak_mem_gb", "network"),
        *("stack", "shard_group", "recompute", "attention"),
    ),
}
# Where a source is found, for tables whose rows do not say it.
SOURCES = "sources"


def read(folder: Path, name: str) -> Rows:
    with (folder / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def shipped(folder: Path, name: str) -> Rows:
    """The rows of a table beside the project, with the columns that are shipped."""
    rows = read(folder, name)
    if name == "multidim/published_2026":
        rows = [row | _settings(row) for row in rows]
    return [{column: row[column] for column in COLUMNS[name]} for row in rows]


def _settings(row: dict[str, str]) -> dict[str, str]:
    """Settings that the source states in words: the stack, and how it shards and recomputes."""
    group = re.search(r"FSDP (\d+) x DP", row["notes"])
    kernel = re.search(r"attention (FA\d)", row["notes"])
    offloads = "recompute Offload" in row["notes"]
    return {
        "stack": "MaxText" if "MaxText" in row["notes"] else row["framework"],
        "shard_group": group[1] if group else "",
        "recompute": "offload" if offloads else "",
        "attention": kernel[1] if kernel else "",
    }


def sources(folder: Path) -> Rows:
    """The address of each source, once."""
    found = dict.fromkeys(
        (row["source"], row["url_or_path"])
        for name in COLUMNS if "url_or_path" not in COLUMNS[name]
        for row in read(folder, name) if "url_or_path" in row
    )  # fmt: skip
    return [{"source": source, "url_or_path": address} for source, address in found]


def write(folder: Path, target: Path = FOLDER) -> None:
    """Write all tables of `folder` to `target`."""
    tables = {name: shipped(folder, name) for name in COLUMNS} | {SOURCES: sources(folder)}
    for name, rows in tables.items():
        path = target / f"{name}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the measured runs")
    write(parser.parse_args().folder)


if __name__ == "__main__":
    main()
