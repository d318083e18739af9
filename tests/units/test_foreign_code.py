"""Code that lies beside a model or a tokenizer is never run, and nobody is asked whether to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.spec.lookup import find_model
from shardwise.spec.record import SpecError
from tests.command import environment

PLANT = "from pathlib import Path\nPath({ran!r}).touch()\nclass Evil: pass\n"
# What a command does with a folder's model and tokenizer.
BUILD = """
import sys
from pathlib import Path
from shardwise.spec.lookup import find_model
from shardwise.spec.record import SpecError
from shardwise.trainer.data.chat_template import TokenizerTemplate
from shardwise.pytorch.build import build_module

folder = Path(sys.argv[1])
for build in (lambda: build_module(find_model(str(folder))), lambda: TokenizerTemplate(folder)):
    try:
        build()
    except SpecError:
        print("refused")
print(sys.stdin.read())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    auto = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "evil.Evil")
    config = {"model_type": "evil", "architectures": ["EvilForCausalLM"], "auto_map": auto}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (tmp_path / "evil.py").write_text(PLANT.format(ran=str(tmp_path / "ran")))
    return tmp_path


def test_the_code_of_a_model_is_not_run(folder: Path) -> None:
    pytest.importorskip("transformers")
    from shardwise.pytorch.build import build_module

    with pytest.raises(SpecError, match="package.module:name"):
        build_module(find_model(str(folder)))
    assert not (folder / "ran").exists()


def test_the_code_of_a_tokenizer_is_not_run(folder: Path) -> None:
    pytest.importorskip("transformers")
    from shardwise.trainer.data.chat_template import TokenizerTemplate

    with pytest.raises(SpecError, match=r"tokenizer\.json"):
        TokenizerTemplate(folder)
    assert not (folder / "ran").exists()


def test_nobody_is_asked_whether_to_run_it(folder: Path, tmp_path: Path) -> None:
    """Whoever answers yes to everything runs nothing: his answer is not read."""
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)],
        input="y\n",
        env=environment(HF_HOME=str(tmp_path / "cache")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["refused", "refused", "y"], done.stderr
    assert not (folder / "ran").exists()


def test_a_factory_takes_no_name_from_what_is_imported_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its module and what that imports come from the working directory; a library does not."""
    pytest.importorskip("torch")
    from shardwise.pytorch.build import find_function

    (tmp_path / "own_factory_a.py").write_text("import own_factory_b\nmake = own_factory_b.make\n")
    (tmp_path / "own_factory_b.py").write_text("def make(): import own_factory_c\n")
    (tmp_path / "own_factory_c.py").write_text("")
    (tmp_path / "sched.py").write_text(PLANT.format(ran=str(tmp_path / "ran")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "sched", raising=False)
    find_function("own_factory_a:make", "model")()
    import sched

    assert hasattr(sched, "scheduler")
    assert not (tmp_path / "ran").exists()
    assert sys.path[-1] == os.getcwd()
