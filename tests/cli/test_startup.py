"""What starting a command loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "scipy", "pandas", "datasets", "huggingface_hub"}
# A preset by its name on a hub, which is not asked.
ON_HUB = ["estimate", "--model", "Qwen/Qwen3-8B", "--cluster", "8xH100-SXM"]
ESTIMATE = ["estimate", "--model", "llama-3-8b", "--cluster", "8xH100-SXM", "--recompute", "full"]


@pytest.mark.parametrize(
    "arguments", [["--help"], ESTIMATE, [*ESTIMATE, "--json"], ["catalog"], ["--version"], ON_HUB]
)
def test_planning_loads_no_torch(arguments: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "shardwise", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = {
        line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()
    }
    assert "typer" in loaded
    assert not loaded & HEAVY


def test_importing_the_package_loads_nothing_of_weight() -> None:
    heavy = "{'numpy', 'pydantic', 'typer', 'rich'}"
    code = f"import sys, shardwise; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
