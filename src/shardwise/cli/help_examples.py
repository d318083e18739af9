"""Examples at the end of each command's help; a test parses every one."""

from __future__ import annotations

from textwrap import wrap

# By command: titles and lines to type.
EXAMPLES: dict[str, dict[str, str]] = {
    "plan": {
        "Best configuration": "shardwise plan --model llama-3-8b --cluster 8xH100-SXM -o run.toml",
        "Time and cost of a trillion tokens": "shardwise plan --model llama-3-70b "
        "--cluster 64x8xH100-SXM@400Gbps --global-batch 4M --tokens 1T --price 2.5",
        "Compare with the current setup": "shardwise plan --model llama-3-8b --cluster 8xH100-SXM "
        "--current accelerate.yaml",
        "What accelerate can run": "shardwise plan --model llama-3-8b --cluster 8xH100-SXM "
        "--for accelerate -o run.toml",
    },
    "estimate": {
        "One configuration": "shardwise estimate --model llama-3-8b --cluster 8xA100-80GB "
        "--strategy zero3 --micro-batch 2 --recompute full",
        "Simulated step for ui.perfetto.dev": "shardwise estimate run.toml --trace step.json.gz",
        "Each number of hosts": "shardwise estimate run.toml --nnodes 1:4",
    },
    "whatif": {
        "Other networks": "shardwise whatif run.toml --vary network=100,200,400",
        "Least network for a target": "shardwise whatif run.toml --least network --for mfu=40%",
        "Devices for a budget": "shardwise whatif run.toml --vary device=A100-80GB,H100-SXM "
        "--tokens 1T --price A100-80GB=1.6,H100-SXM=2.5 --csv",
    },
    "serve": {
        "The planner": "shardwise serve",
        "With the runs of a folder": "shardwise serve runs",
    },
    "train": {
        "On this machine": "shardwise train run.toml --nproc 2",
        "Resume": "shardwise train run.toml --name it --resume",
        "One to four hosts": "shardwise train run.toml --nnodes 1:4 --name it --resume",
        "Profile time and memory": "shardwise train run.toml --profile 3 --profile-memory",
    },
    "rendezvous": {"On a host that does not train": "shardwise rendezvous 10.0.0.9:29400"},
    "doctor": {
        "Before a large run": "shardwise doctor run.toml",
        "All GPUs of this machine": "shardwise doctor -o accept.json",
        "Two checks": "shardwise doctor --only parity,memory",
    },
    "compare": {
        "Three strategies": "shardwise compare run.toml --strategies ddp,zero2,zero3 --rounds 3"
    },
    "tune": {"Benchmark the top 5": "shardwise tune run.toml --top 5 -o best.toml"},
    "calibrate": {
        "This machine": "shardwise calibrate -o cluster.toml",
        "From finished runs": "shardwise calibrate --from-run runs/a --from-run runs/b "
        "-o cluster.toml",
    },
    "trace": {
        "A run": "shardwise trace runs/it",
        "Any PyTorch traces": "shardwise trace traces/ --cluster 4x8xH100-SXM@400Gbps",
        "Regression check": "shardwise trace runs/after --against runs/before",
    },
    "memory": {"Owners of the peak": "shardwise memory snapshot.pickle"},
    "runs": {
        "All runs": "shardwise runs",
        "The best of a sweep": "shardwise runs --where state=done --where strategy.kind=zero3 "
        "--sort loss --show train.learning_rate",
        "Two runs": "shardwise runs s3://bucket/runs --compare first,second",
    },
    "report": {
        "A plan": "shardwise report run.toml",
        "A run": "shardwise report runs/it -o it.html",
        "Several runs": "shardwise report runs/compare -o compare.html",
    },
    "contribute": {
        "Show what would be written": "shardwise contribute runs/it --json",
        "Write it": "shardwise contribute runs/it -o it.json",
    },
    "export": {
        "For accelerate": "shardwise export run.toml --to accelerate -o accelerate.yaml",
        "TrainingArguments for transformers": "shardwise export run.toml --to trainer "
        "-o trainer.json",
        "As a plain PyTorch script": "shardwise export run.toml --to python -o train.py",
    },
    "import": {
        "From accelerate": "shardwise import accelerate.yaml --model llama-3-8b "
        "--cluster 8xH100-SXM -o run.toml",
    },
    "fsck": {"A run's checkpoints": "shardwise fsck runs/it"},
    "export-weights": {"For Hugging Face": "shardwise export-weights runs/it -o exported"},
    "examples": {"Into this folder": "shardwise examples"},
    "catalog": {
        "All devices": "shardwise catalog devices",
        "One device with its sources": "shardwise catalog devices H100-SXM",
        "Instances of providers, with prices": "shardwise catalog instances",
        "Accuracy by device": "shardwise catalog accuracy",
        "Measured kernels of one device": "shardwise catalog kernels --device H100-SXM",
    },
}


def example_lines(command: str) -> list[str]:
    """Lines of help with the examples of a command, wrapped to 80 columns by backslashes."""
    lines = []
    for title, line in EXAMPLES.get(command, {}).items():
        first, *rest = wrap(line, 72, break_long_words=False, break_on_hyphens=False)
        parts = [f"    {first}", *(f"        {part}" for part in rest)]
        lines += [f"  {title}:", *(f"{part} \\" for part in parts[:-1]), parts[-1]]
    return lines
