"""README and documentation: commands run and print what is shown, code runs, links lead somewhere.

What the language of a block promises:

- `sh`: runs here, line by line, in one folder per page; a comment `exits with N` is checked. A
  `text` block right after it is what the last command prints, lines left out standing as `…`.
- `bash`: needs another machine; its syntax and the options of `shardwise` in it are checked.
- `text`: prose otherwise; one that begins with `$ shardwise` has its options checked.
- `python`: runs by itself, or is part of a file in examples/.
- `py`: needs what is not here; it compiles.
- `toml`: the real reader reads it.
- `json`, `yaml`: parse.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
import yaml

from shardwise.cli.main import COMMANDS
from shardwise.observe.rules import read_rules
from shardwise.spec.run import SECTIONS, run_from_dict
from tests.command import shardwise

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SITE = sorted(DOCS.rglob("*.md"))
SKILLS = ROOT / "examples" / "skills"
PAGES = [ROOT / "README.md", *SITE, *sorted(SKILLS.rglob("*.md"))]
BLOCK = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```[ ]*$", re.DOTALL | re.MULTILINE)
LANGUAGES = ("sh", "bash", "text", "python", "py", "toml", "json", "yaml")
LEFT_OUT = "…"
# Numbers of these depend on the machine.
MEASURING = ("train", "doctor", "profile", "compare", "tune", "calibrate", "diff", "trace",
             "report", "runs")  # fmt: skip
ENVIRONMENT = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}

every_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix()
)


class Block(NamedTuple):
    language: str
    text: str


@cache
def blocks(page: Path) -> list[Block]:
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [Block(match[2], textwrap.dedent(match[3])) for match in found]


def of_language(language: str) -> list[Any]:
    return [
        pytest.param(block.text, id=f"{page.relative_to(ROOT).as_posix()}-{number}")
        for page in PAGES
        for number, block in enumerate(blocks(page))
        if block.language == language
    ]


@every_page
def test_every_block_says_what_it_is(page: Path) -> None:
    assert {block.language for block in blocks(page)} <= set(LANGUAGES)
    # A fence that the expression above misses would be checked by nobody.
    fences = [line for line in page.read_text().splitlines() if line.lstrip().startswith("```")]
    assert len(fences) == 2 * len(blocks(page))


# ---- commands -------------------------------------------------------------------------------


def lines_of(script: str) -> list[str]:
    """Commands of a script, continued lines joined."""
    joined = script.replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


@cache
def readme_run() -> str:
    return next(text for kind, text in blocks(ROOT / "README.md") if kind == "toml")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that is over, trained once for all pages that speak of one."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "run.toml").write_text(readme_run())
    words = ["train", "run.toml", "--name", "it", "--steps", "5"]
    subprocess.run(
        [sys.executable, "-m", "shardwise", *words], env=ENVIRONMENT, cwd=folder, check=True
    )
    return folder / "runs" / "it"


# The same question is asked on several pages; what reads and writes no file is answered once.
PURE = re.compile(r"shardwise (plan|estimate|whatif|catalog) (?!.*(\.toml|/|>|\||-o |--trace))")


@cache
def answer(line: str) -> subprocess.CompletedProcess[str]:
    return run_line(line, Path(os.devnull).parent)


def run_line(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = shlex.split(line, comments=True)
    if words[0] == "shardwise" and not re.search(r"[|&;<>$*`]", line.partition(" # ")[0]):
        return shardwise(*words[1:], folder=folder)
    function = f'shardwise() {{ {shlex.quote(sys.executable)} -m shardwise "$@"; }}'
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail\n{function}\n{line}"],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        cwd=folder,
        check=False,
    )


def commands_of(page: Path) -> list[str]:
    return [
        line for block in blocks(page) if block.language == "sh" for line in lines_of(block.text)
    ]


def trains(line: str) -> bool:
    """Whether a command trains or measures, or reads what a run has left."""
    words = shlex.split(line, comments=True)
    measures = words[0] == "shardwise" and words[1] in MEASURING
    return measures or words[0] not in ("shardwise", "pip") or "runs/" in line


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def installs(line: str) -> bool:
    return line.startswith("pip install")


WITH_COMMANDS = [page for page in PAGES if commands_of(page)]
PLANNING = [
    page
    for page in PAGES
    if any(not trains(line) and not installs(line) for line in commands_of(page))
]


def at_night_but(*first: Path) -> list[Any]:
    """These pages in the gate, all others in the workflow of the documentation and in nightly."""
    return [
        pytest.param(page, id=page_id(page), marks=() if page in first else pytest.mark.nightly)
        for page in PLANNING
    ]


@pytest.mark.parametrize("page", at_night_but(ROOT / "README.md", DOCS / "reference" / "cli.md"))
def test_planning_commands_print_what_is_shown(page: Path, tmp_path: Path) -> None:
    """Commands that neither train nor need what another command has left from training."""
    missing: set[str] = set()

    def left_out(line: str) -> bool:
        words = shlex.split(line, comments=True)
        files = [tmp_path / word for word in words if word.endswith(".toml")]
        read = " ".join([*words, *(file.read_text() for file in files if file.exists())])
        if not trains(line) and not any(name in read for name in missing):
            return False
        missing.update(word for before, word in pairwise(words) if before in ("-o", ">"))
        return True

    assert run_page(page, tmp_path, left_out)


@every_page
def test_what_a_page_installs_exists(page: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in filter(installs, commands_of(page)):
        for extras in re.findall(r"shardwise\[([\w,]+)\]", line):
            assert set(extras.split(",")) <= set(project["optional-dependencies"]), line


@pytest.mark.nightly
@pytest.mark.parametrize(
    "page", [page for page in WITH_COMMANDS if any(map(trains, commands_of(page)))], ids=page_id
)
def test_all_commands_print_what_is_shown(
    page: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("transformers")

    def lay_out_a_run(line: str) -> bool:
        words = shlex.split(line, comments=True)
        reads = words[:2] != ["shardwise", "train"] and "runs/it" in words
        if reads and not (tmp_path / "runs" / "it").exists():
            shutil.copytree(request.getfixturevalue("trained"), tmp_path / "runs" / "it")
        return False

    assert run_page(page, tmp_path, lay_out_a_run)


def run_page(page: Path, folder: Path, left_out: Callable[[str], bool]) -> int:
    """Run the commands of a page one after another, but for those that `left_out` names.

    Returns how many have run.
    """
    ran = 0
    (folder / "run.toml").write_text(readme_run())
    shutil.copytree(ROOT / "examples", folder / "examples")
    parts = [*blocks(page), Block("", "")]
    for block, following in pairwise(parts):
        if block.language == "toml" and "[job]" in block.text:
            (folder / "run.toml").write_text(block.text)
        if block.language != "sh":
            continue
        # A text that begins with a prompt shows another moment.
        output = following.language == "text" and not following.text.startswith("$ ")
        lines = lines_of(block.text)
        for line in lines:
            shown = following.text if output and line == lines[-1] else None
            if not installs(line) and not left_out(line):
                check_line(line, shown, folder)
                ran += 1
    return ran


def check_line(line: str, shown: str | None, folder: Path) -> None:
    words = shlex.split(line, comments=True)
    command = words[1] if words[0] == "shardwise" else ""
    # Where a page speaks of eight processes, two show the same here.
    asked = re.sub(r"--nproc \d+", "--nproc 2", line)
    if command == "train" and shown is None and "--profile" not in line:
        asked = asked.replace("shardwise train", "shardwise train --steps 5")  # how far, who cares
    if command == "calibrate":  # the machine may be busy with other tests
        asked = asked.replace("shardwise calibrate", "shardwise calibrate --force")
    done = answer(asked) if PURE.match(asked) else run_line(asked, folder)
    said = f"{line}\n{done.stdout}{done.stderr}"
    expected = re.search(r"# .*exits with (\d+)", line)
    assert done.returncode in ((int(expected[1]),) if expected else (0, 1)), said
    if shown is not None:
        printed = done.stderr if done.returncode == 2 else done.stdout
        assert_shown(shown, printed, exact=command not in MEASURING)


def assert_shown(shown: str, printed: str, *, exact: bool) -> None:
    """Every passage of what is shown stands in what is printed, in order; no gap goes unmarked."""

    def lines(text: str) -> list[str]:
        stripped = [line.rstrip() for line in text.strip("\n").splitlines()]
        return stripped if exact else [without_numbers(line) for line in stripped]

    wanted, rest = lines(shown), lines(printed.strip())
    if LEFT_OUT not in wanted:
        assert rest == wanted
        return
    passages = [part.split("\n") for part in "\n".join(wanted).split(LEFT_OUT)]
    for number, part in enumerate(passages):
        passage = part[bool(number) : len(part) - (number < len(passages) - 1)]
        if not passage:
            continue
        places = range(len(rest) - len(passage) + 1)
        at = next((i for i in places if rest[i : i + len(passage)] == passage), None)
        assert at is not None, f"{passage} is not in {rest}"
        assert number or at == 0, f"lines before {passage[0]!r} are left out without a mark"
        rest = rest[at + len(passage) :]
    assert wanted[-1] == LEFT_OUT or not rest, f"lines after the last are left out: {rest}"


def without_numbers(line: str) -> str:
    """What a line says when timings and losses are left out; columns keep their order."""
    return " ".join(re.sub(r"[-+]?\d[\d.,-]*(%| ?[mµ]?s\b)?|exact", "#", line).split())


@cache
def options_of(command: str) -> str:
    """The help of a command, which names all its options."""
    done = shardwise(command, "--help", COLUMNS="300")
    assert done.returncode == 0
    return done.stdout


def commands_in(text: str) -> Iterator[list[str]]:
    """Words of every use of `shardwise` in a text, wherever in a line it stands."""
    for line in text.replace("\\\n", " ").splitlines():
        for found in re.finditer(r"(?:^|[\s/])shardwise ((?:[a-z-]+)\b[^|>&`\"]*)", line):
            words = found[1].partition(" #")[0].replace("'", "").split()
            if words[0] in COMMANDS:
                yield words


@every_page
def test_options_of_commands_that_are_only_shown_exist(page: Path) -> None:
    shown = [b.text for b in blocks(page) if b.language in ("bash", "yaml")]
    shown += [b.text.split("\n")[0] for b in blocks(page) if b.text.startswith("$ ")]
    # And what stands in the middle of a sentence or a table.
    shown += re.findall(r"`(shardwise [^`]+)`", BLOCK.sub("", page.read_text()))
    for words in (words for text in shown for words in commands_in(text)):
        for word in words:
            if word.startswith("--"):
                option = word.partition("=")[0]
                assert re.search(rf"{option}\b", options_of(words[0])), " ".join(words)


@pytest.mark.parametrize("script", of_language("bash"))
def test_scripts_for_other_machines_are_well_formed(script: str) -> None:
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- code and configuration -----------------------------------------------------------------


@cache
def examples() -> list[str]:
    return [file.read_text() for file in sorted((ROOT / "examples").rglob("*.py"))]


@pytest.mark.parametrize("code", of_language("python"))
def test_python_runs_or_is_part_of_an_example(code: str, tmp_path: Path) -> None:
    passages = [part.strip("\n") for part in re.split(r"^\s*\.\.\.\s*$", code, flags=re.MULTILINE)]
    if any(all(part in example for part in passages) for example in examples()):
        return
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, f"{code}\n{done.stderr}"


@pytest.mark.parametrize("code", of_language("py"))
def test_python_for_other_machines_compiles(code: str) -> None:
    compile(code, "block", "exec")


@pytest.mark.parametrize("text", of_language("toml"))
def test_toml_is_read(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tomllib.loads(text)
    # Where a page speaks of a pretrained model, a small one stands in its folder.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 8}
    config = {"model_type": "llama", "intermediate_size": 8, **small}
    (tmp_path / "my-model" / "config.json").write_text(json.dumps(config))
    if set(data) <= set(SECTIONS):
        # A section alone is read beside the shortest run.
        whole = {"model": "llama-3-8b", "cluster": "8xH100-SXM", **data}
        if str(whole["cluster"]).endswith(".toml"):
            whole["cluster"] = "1x2xCPU"  # stands for a file that calibrate has written
        assert run_from_dict(whole).resolved().strategy.shard
        return
    (tmp_path / "rules.toml").write_text(text)
    assert read_rules(tmp_path / "rules.toml")


@pytest.mark.parametrize("text", of_language("json"))
def test_json_parses(text: str) -> None:
    assert json.loads(text)


@pytest.mark.parametrize("text", of_language("yaml"))
def test_yaml_parses(text: str) -> None:
    assert all(isinstance(part, dict) for part in yaml.safe_load_all(text))


# ---- links and navigation --------------------------------------------------------------------


def test_links_of_the_readme_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text()):
        if not urlsplit(link).scheme:
            assert (ROOT / link.partition("#")[0]).exists(), link


def test_every_page_is_in_the_navigation() -> None:
    def pages(part: Any) -> Iterator[str]:
        if isinstance(part, str):
            yield part
        else:
            for one in part.values() if isinstance(part, dict) else part:
                yield from pages(one)

    listed = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in SITE)


def test_a_skill_is_as_assistants_load_it() -> None:
    """A name equal to its folder's, a description within 1,024 characters, and pages it links."""
    (skill,) = SKILLS.rglob("SKILL.md")
    _, front, body = skill.read_text().split("---\n", 2)
    about = yaml.safe_load(front)
    assert about["name"] == skill.parent.name
    assert re.fullmatch(r"[a-z0-9-]{1,64}", about["name"])
    assert 0 < len(about["description"]) <= 1024
    linked = {skill.parent / link for link in re.findall(r"\]\(([^)]+)\)", body)}
    assert linked == set(skill.parent.rglob("*.md")) - {skill}


@pytest.mark.usefixtures("make")
def test_the_first_sentence_of_a_page() -> None:
    from make.llms import first_sentence

    page = """---
hide: x
---

# Title

```sh
ls
```

- a list

**One** [link](a.md), `0.5.1`
of 2. Two."""
    assert first_sentence(page) == "One link, `0.5.1` of 2."
    assert first_sentence("# Title\n\nAs follows:\n\n| a |") == "As follows"
    assert first_sentence("# Title") == ""


# ---- what is made from the code -------------------------------------------------------------


@pytest.mark.usefixtures("make")
def test_every_field_has_a_meaning_and_every_meaning_a_field() -> None:
    from make import answers
    from make.fields import MEANINGS, meaning
    from make.schema import RECORDS

    from shardwise.step import profile

    profiles = [one for one in vars(profile).values() if hasattr(one, "_fields")]
    known = {one.__name__: one for one in (*RECORDS, *profiles, *answers.RECORDS)}
    for name, record in known.items():
        fields = getattr(record, "model_fields", None) or record._fields
        assert all(meaning(record, key) for key in fields), name
        assert set(MEANINGS.get(name, {})) <= set(fields), name
    assert set(MEANINGS) <= set(known)


@pytest.mark.usefixtures("make")
def test_a_command_of_the_reference_names_all_its_options() -> None:
    from make.commands import commands_page, written

    page = commands_page()
    sections = {part.partition("\n")[0]: part for part in page.split("## shardwise ")[1:]}
    assert list(sections) == [name for name, _ in written()]
    for name, section in sections.items():
        for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", options_of(name))) - {"--help"}:
            assert option in section, f"{name} {option}"


@pytest.mark.usefixtures("make")
def test_the_schema_takes_what_the_reader_takes() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    from make.schema import run_schema

    checker = jsonschema.Draft7Validator(run_schema())
    jsonschema.Draft7Validator.check_schema(run_schema())
    runs = [tomllib.loads(text) for page in PAGES for kind, text in blocks(page) if kind == "toml"]
    runs += [tomllib.loads(path.read_text()) for path in (ROOT / "examples").glob("*.toml")]
    least = {"model": "llama-3-8b", "cluster": "8xH100-SXM"}
    for run in runs:
        if set(run) <= set(SECTIONS):
            checker.validate({**least, **run})
    wrong: list[dict[str, Any]] = [
        {"strategy": {"kind": "zero4"}},
        {"strategy": {"kind": "zero3", "micro_batches": 2}},
        {"strategy": {"kind": "zero3", "micro_batch": 0}},
        {"job": {"global_batch": "4Mi"}},
        {"train": {"learning_rate": 0}},
        {"cluster": {"nodes": 2}},
        {"model": {"family": "llama"}},
        {"models": "llama-3-8b"},
    ]
    for run in wrong:
        assert not checker.is_valid({**least, **run}), run
        with pytest.raises(ValueError, match=":"):
            run_from_dict({**least, **run})


@pytest.mark.usefixtures("make")
def test_a_profile_is_as_its_schema_says() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    from make.fields import profile_schema

    import shardwise

    schema = profile_schema("shardwise.step.profile.StepProfile")
    for strategy in ("ddp", "zero3", "hsdp"):
        profile = shardwise.estimate("llama-3-8b", "2x8xH100-SXM@400Gbps", strategy).to_dict()
        jsonschema.validate(profile, schema)
        unknown = {k for k in profile if k not in schema["properties"]}
        assert not unknown
    shown = [text for page in PAGES for kind, text in blocks(page) if kind == "json"]
    for text in shown:
        if "provenance" in json.loads(text):
            jsonschema.validate(json.loads(text), schema)


def test_the_profile_shown_is_what_the_command_prints() -> None:
    parts = blocks(DOCS / "reference" / "step-profile.md")
    command = next(block.text for block in parts if block.language == "sh")
    shown = next(block.text for block in parts if block.language == "json")
    done = run_line(command.strip(), ROOT)
    assert json.loads(done.stdout) == json.loads(shown)


@pytest.mark.usefixtures("make")
def test_figures_show_what_the_simulator_says_now() -> None:
    from make import figures, pictures

    for maker in (figures, pictures):
        for name, drawn in maker.draw_all().items():
            assert (maker.FOLDER / name).read_text() == drawn, f"run {maker.__file__} to draw it"


@pytest.mark.usefixtures("make")
def test_bytes_that_leave_a_node() -> None:
    """By hand: of 8 nodes with 8 devices, a ring of 64 leaves each node once, replicas 8 times."""
    from make.tables import crossings

    from shardwise.predict.api import estimate_run
    from shardwise.spec.question import describe_run

    def leaving(strategy: str) -> float:
        run = describe_run("llama-3-8b", "8x8xH100-SXM@400Gbps", strategy)
        return sum(one.sent_bytes * crossings(one, run) for one in estimate_run(run).traffic)

    elements = 8_030_261_248
    # Gathers in bf16, all units and then all but the root; gradients in fp32.
    root = 2 * 128_256 * 4096 + 4096
    expected = (2 * elements + 2 * (elements - root) + 4 * elements) * 63 / 64
    assert leaving("zero3") == pytest.approx(expected, rel=1e-3)
    assert leaving("zero3:8") == pytest.approx(8 * 2 * 4 * (elements / 8) * 7 / 8, rel=1e-3)
