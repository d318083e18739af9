"""The program that scripts are cut from: what is left of it for some settings, and that it runs."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.stacks.write.lightning import lightning_settings
from shardwise.stacks.write.python import settings_of
from shardwise.stacks.write.python.fold import fold
from shardwise.stacks.write.python.prune import prune, read_module
from shardwise.stacks.write.python.script import write_script, write_whole_program
from tests.command import ROOT
from tests.stacks.runs import tiny

PROGRAM = ROOT / "src/shardwise/stacks/program"


def test_a_run_sets_everything_that_the_program_has() -> None:
    tree = ast.parse((PROGRAM / "settings.py").read_text())
    own = {
        target.id
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    settings = lightning_settings(tiny())
    constants = {name for group in settings.constants.values() for name in group}
    assert constants | set(settings.choices) == own
    assert not constants & set(settings.choices)


@pytest.mark.parametrize("file", sorted(PROGRAM.glob("*.py")), ids=lambda file: file.stem)
def test_modules_can_be_cut(file: Path) -> None:
    """Only these statements are, and columns count characters only in ASCII."""
    text = file.read_text(encoding="utf-8")
    assert text.isascii()
    known = (ast.Expr, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.If)
    if file.stem != "settings":
        assert all(isinstance(statement, known) for statement in ast.parse(text).body)


def test_no_name_is_defined_twice() -> None:
    names = [
        node.name
        for file in PROGRAM.glob("*.py")
        if file.stem not in ("lightning_run", "own_code")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    ]
    assert len(names) == len(set(names))


# (program, what is left of it where A is true, B is false, N is 3 and the rest is open)
CUTS: dict[str, tuple[str, str]] = {
    "branch": ("if A:\n    x = 1\nelse:\n    x = 2\n", "x = 1\n"),
    "other branch": ("if B:\n    x = 1\nelse:\n    # Why.\n    x = 2\n", "# Why.\nx = 2\n"),
    "no branch": ("x = 0\n# Why.\nif B:\n    x = 1\ny = 2\n", "x = 0\ny = 2\n"),
    "chain": ("if B:\n    x = 1\nelif open:\n    x = 2\n", "if open:\n    x = 2\n"),
    "chain of three": (
        "if B:\n    x = 1\nelif N > 2:\n    x = 2\nelif open:\n    x = 3\n",
        "x = 2\n",
    ),
    "open chain": (
        "if open:\n    x = 1\nelif A:\n    x = 2\nelse:\n    x = 3\n",
        "if open:\n    x = 1\nelse:\n    x = 2\n",
    ),
    "end of a chain": ("if open:\n    x = 1\nelif B:\n    x = 2\n", "if open:\n    x = 1\n"),
    "middle of a chain": (
        "if open:\n    x = 1\nelif B:\n    x = 2\nelse:\n    x = 3\n",
        "if open:\n    x = 1\nelse:\n    x = 3\n",
    ),
    "nested": (
        "def f():\n    if A:\n        if N == 3:\n            return 1\n    return 2\n",
        "def f():\n    return 1\n",
    ),
    "after a return": (
        "def f():\n    if A:\n        return 1\n    # Never.\n    return 2\n",
        "def f():\n    return 1\n",
    ),
    "expression": ("x = 1 if B else f(2 if A else 3)\n", "x = f(2)\n"),
    "operands": (
        "if A and open and not B:\n    x = 1\nif B or open:\n    x = 2\n",
        "if open:\n    x = 1\nif open:\n    x = 2\n",
    ),
    "context": (
        "with f() if B else nullcontext():\n    # Inside.\n    x = 1\n",
        "# Inside.\nx = 1\n",
    ),
    "kept context": ("with f() if A else nullcontext():\n    x = 1\n", "with f():\n    x = 1\n"),
    "spread in a call": (
        "f(\n    a=1,\n    **({'b': 2} if A else {}),\n    **({'c': 3} if B else {}),\n)\n",
        "f(\n    a=1,\n    b=2,\n)\n",
    ),
    "spread on a line": ("f(a, **({'b': 2} if B else {}), c=3)\n", "f(a, c=3)\n"),
    "spread in a dictionary": (
        "x = {\n    'a': 1,\n    **({'b': N} if A else {}),\n}\n",
        "x = {\n    'a': 1,\n    'b': N,\n}\n",
    ),
    "spread in a list": ("x = [1, *([2] if A else []), *([3] if B else [])]\n", "x = [1, 2]\n"),
    "lines of an expression": (
        "f(\n    a=(\n        g(\n            1,\n        )\n        if A\n        else 2\n    )"
        "\n)\n",
        "f(\n    a=g(\n        1,\n    )\n)\n",
    ),
    "choice": ("x = f(CHOICE, A)\n", "x = f('text', A)\n"),
}


@pytest.mark.parametrize("name", CUTS)
def test_what_settings_rule_out_is_cut(name: str) -> None:
    program, left = CUTS[name]
    known = {"A": True, "B": False, "N": 3, "CHOICE": "text"}
    assert fold(program, known, {"CHOICE": "'text'"}) == left
    assert fold(program, {}, {}) == program


def test_definitions_that_nothing_needs_are_left_out() -> None:
    other = read_module(
        "import math\nimport json\n\n\ndef used(x: Size) -> float:\n    return math.pi\n\n\n"
        "# About it.\nclass Size:\n    ...\n\n\ndef unused():\n    size = json\n    return size\n",
        "program",
    )
    main = read_module(
        "from program.other import used\nimport os\n\n\ndef size():\n    ...\n\n\n"
        "if __name__ == '__main__':\n    used(1)\n",
        "program",
    )
    script = prune([other, main])
    assert [text.splitlines()[0] for text in script.definitions] == [
        "def used(x: Size) -> float:",
        "# About it.",
        "if __name__ == '__main__':",
    ]
    assert {one.bound for one in script.imports} == {"math"}


def test_a_script_trains_as_the_whole_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is cut off changes nothing: losses and gradients are the same, bit by bit."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    run = tiny(
        cluster="1x1xCPU",
        strategy={"kind": "single", "recompute": "full", "loss": "chunked", "accumulate": 2},
        job={"seq_len": 32, "global_batch": None},
        train={"steps": 3, "warmup_steps": 2, "threads": 1, "checkpoint": False},
    )
    figures = []
    for write in (write_script, write_whole_program):
        folder = tmp_path / write.__name__
        folder.mkdir()
        monkeypatch.chdir(folder)
        names: dict[str, Any] = {"__name__": "script"}
        exec(compile(write("A script.", "train", settings_of(run)), "train.py", "exec"), names)
        names["train"]()
        text = Path("trained/metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        figures.append([(line["loss"], line["gradient_norm"]) for line in lines])
    assert len(set(figures[0])) == 3
    assert figures[0] == figures[1]
