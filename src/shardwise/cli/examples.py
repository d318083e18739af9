"""Examples at the end of each command's help. A test reads every one of them with its command."""

from __future__ import annotations

# By command: what is wanted, and what to type for it.
EXAMPLES: dict[str, dict[str, str]] = {
    "plan": {
        "What to run": "shardwise plan --model llama-3-8b --cluster 8xH100-SXM -o run.toml",
        "Time and cost of a trillion tokens": "shardwise plan --model llama-3-70b "
        "--cluster 64x8xH100-SXM@400Gbps --global-batch 4M --tokens 1T --price 2.5",
        "Against what runs today": "shardwise plan --model llama-3-8b --cluster 8xH100-SXM "
        "--current accelerate.yaml",
    },
    "estimate": {
        "One configuration": "shardwise estimate --model llama-3-8b --cluster 8xA100-80GB "
        "--strategy zero3 --micro-batch 2 --recompute full",
        "Its step for ui.perfetto.dev": "shardwise estimate run.toml --trace step.json.gz",
    },
    "whatif": {
        "Other networks": "shardwise whatif run.toml --vary network=100,200,400",
        "The least that is enough": "shardwise whatif run.toml --least network --for mfu=40%",
    },
    "train": {
        "On this machine": "shardwise train run.toml --nproc 2",
        "On after a kill": "shardwise train run.toml --name it --resume",
    },
    "profile": {"Where the time goes": "shardwise profile run.toml --memory"},
    "doctor": {"Before a large run": "shardwise doctor run.toml"},
    "compare": {"For real": "shardwise compare run.toml --strategies ddp,zero2,zero3 --rounds 3"},
    "tune": {"The best few, probed": "shardwise tune run.toml --top 5 -o best.toml"},
    "calibrate": {
        "This machine": "shardwise calibrate -o cluster.toml",
        "From runs that are there": "shardwise calibrate --from-run runs/a --from-run runs/b "
        "-o cluster.toml",
    },
    "trace": {
        "A run": "shardwise trace runs/it",
        "Traces of others": "shardwise trace traces/ --cluster 4x8xH100-SXM@400Gbps",
    },
    "diff": {"Slower beyond noise?": "shardwise diff runs/before runs/after"},
    "memory": {"Who holds the peak": "shardwise memory snapshot.pickle"},
    "report": {
        "A plan": "shardwise report run.toml",
        "A run": "shardwise report runs/it -o it.html",
        "Several, compared": "shardwise report runs/compare -o compare.html",
    },
    "export": {
        "For accelerate": "shardwise export run.toml --to accelerate -o accelerate.yaml",
        "As a script of plain torch": "shardwise export run.toml --to python -o train.py",
    },
    "import": {
        "What a stack runs today": "shardwise import accelerate.yaml --model llama-3-8b "
        "--cluster 8xH100-SXM -o run.toml",
    },
    "fsck": {"Anyone's checkpoint": "shardwise fsck runs/it"},
    "export-weights": {"For Hugging Face": "shardwise export-weights runs/it -o exported"},
    "catalog": {
        "All devices": "shardwise catalog devices",
        "One, with its sources": "shardwise catalog devices H100-SXM",
    },
}


def epilog(command: str) -> str:
    """Markdown; typer draws it below the options."""
    told = [f"- {wanted}: `{line}`" for wanted, line in EXAMPLES.get(command, {}).items()]
    return "\n".join(["**Examples**\n", *told]) if told else ""
