"""The planner's folder, built from its pinned files, and the script that judges a page."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.command import ROOT

LOCK = ROOT / "docs" / "make" / "planner.lock.toml"
# The only package on PyPI that holds numpy as Pyodide distributes it.
HOLDS_NUMPY = "open_webui==0.12.4"


def numpy_wheel(downloads: Path) -> Path:
    """numpy's wheel of Pyodide's distribution, out of a package that carries it."""
    packages = tomllib.loads(LOCK.read_text(encoding="utf-8"))["package"]
    name = next(one["file"] for one in packages if one["name"] == "numpy")
    path = downloads / name
    if not path.exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", HOLDS_NUMPY]
        subprocess.run([*command, "-d", str(downloads)], check=True)
        with zipfile.ZipFile(next(downloads.glob("open_webui-*.whl"))) as holder:
            inside = next(entry for entry in holder.namelist() if entry.endswith(f"/{name}"))
            path.write_bytes(holder.read(inside))
    return path


def axe_script(downloads: Path) -> str:
    """The script that finds what is not accessible."""
    subprocess.run(["npm", "pack", "axe-core@4.14.0", "--silent"], cwd=downloads, check=True,
                   capture_output=True)  # fmt: skip
    with tarfile.open(downloads / "axe-core-4.14.0.tgz") as archive:
        script = archive.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()


def built_planner(output: Path, downloads: Path) -> Path:
    """Build the folder with numpy inside."""
    for tool in ("npm", "chromium"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    downloads.mkdir(exist_ok=True)
    script = ROOT / "docs" / "make" / "planner.py"
    words = [str(script), str(output), "--downloads", str(downloads)]
    subprocess.run([sys.executable, *words, "--numpy", str(numpy_wheel(downloads))], check=True)
    return output
