"""What starting a command loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "plotly", "scipy", "pandas", "datasets"}
ESTIMATE = ["estimate", "--model", "llama-3-8b", "--cluster", "8xH100-SXM", "--recompute", "full"]


@pytest.mark.parametrize("arguments", [["--help"], ESTIMATE, [*ESTIMATE, "--json"], ["catalog"]])
def test_planning_loads_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['shardwise', *{arguments!r}]\n"
        "from shardwise.cli.start import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        f"loaded = sorted({HEAVY!r} & set(sys.modules))\n"
        "print('LOADED', loaded)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_importing_the_package_loads_nothing_of_weight() -> None:
    heavy = "{'numpy', 'pydantic', 'typer', 'rich'}"
    code = f"import sys, shardwise; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
