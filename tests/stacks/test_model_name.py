"""The model that a file names: read from every stack, looked up, never called as code."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

import shardwise
from tests.command import shardwise as command

yaml = pytest.importorskip("yaml")

NAME = "Qwen/Qwen3-8B"
IMPORTS = "import transformers\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
TRL = f"{IMPORTS}from trl import SFTConfig, SFTTrainer\nargs = SFTConfig(max_length=512)\n"
FSDP = f"{IMPORTS}from torch.distributed.fsdp import fully_shard\n"
# Scripts that name the model, and how.
SCRIPTS = {
    "literal": f"{TRL}AutoModelForCausalLM.from_pretrained('{NAME}')\n",
    "constant": f"{TRL}ID = '{NAME}'\nm = AutoModelForCausalLM.from_pretrained(ID, dtype='auto')\n",
    "keyword": f"{TRL}transformers.Qwen3ForCausalLM.from_pretrained(model_name='{NAME}')\n",
    "tokenizer first": f"{TRL}AutoTokenizer.from_pretrained('other/one')\n"
    f"AutoModelForCausalLM.from_pretrained('{NAME}')\n",
    "trainer": f"{TRL}SFTTrainer(model='{NAME}', args=args)\n",
    "trainer by position": f"{TRL}SFTTrainer('{NAME}', args=args)\n",
    "own loop": f"{FSDP}m = AutoModelForCausalLM.from_pretrained('{NAME}')\nfully_shard(m)\n",
}
FILES: dict[str, dict[str, object]] = {
    "trl": {"model_name_or_path": NAME, "max_length": 512, "packing": True},
    "axolotl": {"base_model": NAME, "micro_batch_size": 1, "sequence_len": 512},
    "llama-factory": {"model_name_or_path": NAME, "stage": "sft", "cutoff_len": 512},
}


def read(folder: Path, text: str, name: str = "a.py", **more: str) -> shardwise.ImportedFile:
    (folder / name).write_text(text)
    return shardwise.import_(folder / name, **more)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_name_the_model(script: str, tmp_path: Path) -> None:
    found = read(tmp_path, SCRIPTS[script])
    assert found.imported.model == NAME
    assert [one.part for one in found.lacks] == ["cluster"]
    assert tomllib.loads(found.toml)["model"] == NAME


@pytest.mark.parametrize("stack", FILES)
def test_files_name_the_model(stack: str, tmp_path: Path) -> None:
    assert read(tmp_path, yaml.safe_dump(FILES[stack]), "a.yaml").imported.model == NAME


def test_a_named_model_that_is_here_makes_a_run(tmp_path: Path) -> None:
    found = read(tmp_path, SCRIPTS["literal"].replace(NAME, "gpt2"), cluster="8xH100-SXM")
    assert not found.lacks
    assert found.run is not None
    assert found.run.model.name == "gpt2"
    given = read(tmp_path, SCRIPTS["literal"], model="gpt2", cluster="8xH100-SXM")
    assert given.run is not None
    assert given.run.model.name == "gpt2"


@pytest.mark.parametrize("name", ["os:system", "a" * 501, "a\nb", " "])
def test_what_is_no_name_of_a_model_is_not_looked_up(name: str, tmp_path: Path) -> None:
    """`module:function` is a model of ours: reading a file of others must not make us call it."""
    text = yaml.safe_dump({**FILES["axolotl"], "base_model": name})
    found = read(tmp_path, text, "a.yaml", cluster="8xH100-SXM")
    assert found.imported.model is None
    assert found.run is None
    assert any(one.key == "base_model" and one.is_lost for one in found.imported.outcomes)


def test_a_name_known_only_at_run_time_is_lost(tmp_path: Path) -> None:
    text = f"{TRL}AutoModelForCausalLM.from_pretrained(arguments.model)\n"
    found = read(tmp_path, text)
    assert found.imported.model is None
    assert [one.key for one in found.imported.outcomes if one.key == "model"] == ["model"]


def test_each_door_asks_with_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"train_batch_size": 8}))
    printed = command("import", "a.json", folder=tmp_path).stderr
    assert "give --model" in printed
    assert "give --cluster" in printed
    found = shardwise.import_(tmp_path / "a.json")
    assert [sentence.count("--") for sentence in found.missing] == [0, 0]
