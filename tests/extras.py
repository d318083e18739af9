"""An interpreter that imports what one extra of pyproject.toml installs, and no other package."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.command import ROOT

_SITE = """
import sys


class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}: not in the extra", name=name)


sys.meta_path.insert(0, Refused())
"""


def write_site(folder: Path, extra: str) -> None:
    """Write a `sitecustomize` for a folder of PYTHONPATH that refuses packages of other extras."""
    kept = _installed_by(extra)
    blocked = {
        module
        for module, owners in metadata.packages_distributions().items()
        if not kept & {canonicalize_name(owner) for owner in owners}
    }
    (folder / "sitecustomize.py").write_text(_SITE.format(blocked=blocked - {"shardwise"}))


def _installed_by(extra: str) -> set[str]:
    """Names of the distributions that `pip install .[extra]` installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {
        canonicalize_name(name): texts for name, texts in project["optional-dependencies"].items()
    }
    found: dict[str, set[str]] = {}
    waiting = [(Requirement("shardwise"), {"", extra})]
    while waiting:
        asked, wanted = waiting.pop()
        name = canonicalize_name(asked.name)
        new = wanted - found.get(name, set())
        if not new:
            continue
        found.setdefault(name, set()).update(new)
        if name == "shardwise":
            texts = [
                t
                for one in new
                for t in (extras[canonicalize_name(one)] if one else project["dependencies"])
            ]
        else:
            texts = _requires(name)
        for requirement in map(Requirement, texts):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": one}) for one in new):
                waiting.append((requirement, {"", *requirement.extras}))
    return set(found)


def _requires(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []  # of another platform
