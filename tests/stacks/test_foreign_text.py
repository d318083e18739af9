"""Text of a run in the files of other stacks: it changes no statement, key or comment."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest

from shardwise.spec.lookup import ModuleRef
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.spec.train import DataSettings
from shardwise.stacks.write.exported import Target
from shardwise.stacks.write.exports import export_run
from tests.stacks.runs import HOSTILE, HOSTILE_NAME, tiny

yaml = pytest.importorskip("yaml")
ENDS = '\\N{BULLET} \\x \\" """\n"""; import os #'
STACKS = {
    "python": tiny,
    "lightning": tiny,
    "torchtitan": tiny,
    "megatron-bridge": lambda **more: tiny(cluster="1x2xH100-SXM", **more),
    "accelerate": tiny,
    "trainer": tiny,
    # Of another template.
    "trainer with adapter": lambda **more: tiny(adapter={"rank": 4}, **more),
    "deepspeed": tiny,
    "trl": tiny,
    "axolotl": tiny,
    "llama-factory": tiny,
    "kubernetes": tiny,
}


def run_with(stack: str, name: str, text: str) -> RunSpec:
    return STACKS[stack](
        model={"name": name},
        train={"folder": text},
        data={"path": [f"{text}.jsonl"], "format": "text", "text_key": text, "tokenizer": text},
    )


def structure(file: str, text: str) -> Any:
    """Everything in a file but its texts."""
    if file.endswith(".py"):
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                node.value = ""
        return ast.dump(tree)
    if file.endswith(".json"):
        return _without_texts(json.loads(text))
    return [_without_texts(one) for one in yaml.safe_load_all(text)]


def _without_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_texts(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_without_texts(part) for part in value]
    return "" if isinstance(value, str) else value


@pytest.mark.parametrize("stack", STACKS)
def test_only_texts_differ_where_only_texts_do(stack: str) -> None:
    target_stack = stack.partition(" ")[0]
    # torchtitan imports the file as a module.
    taken = stack != "torchtitan"
    plain = export_run(run_with(stack, "name", "words"), target_stack, Target(file="a.py"))
    for text in (HOSTILE, ENDS):
        target = Target(file=f"{text}.py" if taken else "a.py")
        written = export_run(run_with(stack, HOSTILE_NAME, text), target_stack, target)
        assert structure(written.name, written.text) == structure(plain.name, plain.text)


NAMES = ["a:b", "a.b_1:c", "módulo:f"]
NO_NAMES = ["a", "a:", ":b", "a:b()", "a.b", "a..b:c", "import:f", "a:class", "a:b\n", "a b:c",
            "a:b;import os", "os.system('x'):f", "a:b:c"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_function_of_the_user_is_named(name: str) -> None:
    assert ModuleRef.read({"factory": name}).name == name
    assert DataSettings.read({"source": name}).source == name


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_name_that_is_code_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=r"package\.module:name"):
        ModuleRef.read({"factory": name})
    with pytest.raises(SpecError, match=r"package\.module:name"):
        DataSettings.read({"source": name})
