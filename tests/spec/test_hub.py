"""Models by their names on a hub: the real client against a hub on the loopback."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.spec import catalogue
from shardwise.spec.hub import LARGEST_CONFIG_BYTES, HubName, hub_name
from shardwise.spec.huggingface import to_config
from shardwise.spec.lookup import find_model
from shardwise.spec.record import SpecError
from tests.command import environment
from tests.hub import TOKEN, Hub, Shared, commit_of, serving_hub

pytest.importorskip("huggingface_hub", reason="the extra hf is not installed")

# A model that no preset is called after, so that it is looked up.
NAME = "acme/Small-1B"
CONFIG = json.dumps(to_config(catalogue.model("llama-3.2-1b"))).encode()
OTHER = json.dumps(to_config(catalogue.model("qwen3-0.6b"))).encode()
# Looks up names in a process of its own, since the client reads its variables once.
LOOK_UP = """
import json, sys
from shardwise.spec.lookup import find_model
from shardwise.spec.record import SpecError
for text in sys.argv[1:]:
    try:
        found = find_model(text)
        print(json.dumps({"name": found.name, "config": found.config}))
    except SpecError as error:
        print(json.dumps({"problems": error.problems}))
"""

READ_RUN = """
import sys
from shardwise.spec.question import describe_run
print(describe_run(run=sys.argv[1], model=(sys.argv[2:] or [None])[0]).model.name)
"""
COMMAND = "from shardwise.cli.start import main; main()"


class Home:
    """A user's folder, from which names are looked up on one hub."""

    def __init__(self, folder: Path, hub: Hub) -> None:
        self.folder, self.hub = folder, hub

    def python(self, code: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = environment(
            HF_ENDPOINT=self.hub.address, HF_HOME=str(self.folder / "hf"), HF_HUB_OFFLINE="0",
            HF_TOKEN="", HF_HUB_DISABLE_TELEMETRY="1",
        )  # fmt: skip
        return subprocess.run(
            [sys.executable, "-c", code, *words],
            env={**kept, **variables},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def look_up(self, *names: str, **variables: str) -> list[dict[str, Any]]:
        done = self.python(LOOK_UP, *names, **variables)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def refused(self, name: str, **variables: str) -> str:
        """The one sentence with which a name is refused."""
        (found,) = self.look_up(name, **variables)
        (sentence,) = found["problems"]
        assert "\n" not in sentence
        return str(sentence)

    def downloaded(self) -> list[str]:
        return sorted({path.name for path in self.folder.glob("hf/hub/models--*/snapshots/*/*")})


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving_hub({NAME: Shared({"main": CONFIG, "v2": OTHER, "refs/pr/1": OTHER})}) as hub:
        yield hub


@pytest.fixture
def home(tmp_path: Path, hub: Hub) -> Home:
    return Home(tmp_path, hub)


def test_a_model_is_found_by_its_name_and_only_its_config_is_downloaded(home: Home) -> None:
    (found,) = home.look_up(NAME)
    assert found["name"] == "Small-1B"
    assert (Path(found["config"]) / "config.json").read_bytes() == CONFIG
    assert home.downloaded() == ["config.json"]
    got = [asked.path for asked in home.hub.asked if asked.method == "GET"]
    assert [path.rpartition("/")[2] for path in got] == ["config.json"]


def test_a_revision_is_a_branch_a_pull_request_or_a_commit(home: Home) -> None:
    commit = commit_of(OTHER)
    found = home.look_up(f"{NAME}@v2", f"{NAME}@refs/pr/1", f"{NAME}@{commit}", f"{NAME}@main")
    assert [Path(one["config"]).name for one in found] == [commit] * 3 + [commit_of(CONFIG)]
    assert "'v3'" in home.refused(f"{NAME}@v3")


def test_what_is_in_the_cache_is_used_without_a_hub(home: Home) -> None:
    first = home.look_up(NAME, f"{NAME}@v2")
    asked = len(home.hub.asked)
    assert home.look_up(NAME, f"{NAME}@v2", HF_HUB_OFFLINE="1") == first
    # A commit never changes.
    assert home.look_up(f"{NAME}@{commit_of(CONFIG)}") == first[:1]
    assert len(home.hub.asked) == asked
    assert home.look_up(NAME, HF_ENDPOINT="http://127.0.0.1:9") == first[:1]
    # Nor does it matter that the model was closed meanwhile.
    home.hub.models[NAME].gated = True
    assert home.look_up(NAME) == first[:1]


def test_offline_is_told_from_out_of_reach(home: Home) -> None:
    offline = home.refused(NAME, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE" in offline
    assert not home.hub.asked
    address = "http://127.0.0.1:9"
    away = home.refused(NAME, HF_ENDPOINT=address)
    assert address in away
    assert "HF_HUB_OFFLINE" not in away


def test_without_the_client_presets_are_found_and_others_say_what_to_install(home: Home) -> None:
    missing = "import sys; sys.modules['huggingface_hub'] = None\n"
    done = home.python(f"{missing}{LOOK_UP}", "Qwen/Qwen3-8B", NAME)
    found, refused = (json.loads(line) for line in done.stdout.splitlines())
    assert found["name"] == "qwen3-8b"
    (sentence,) = refused["problems"]
    assert 'pip install "shardwise[hf]"' in sentence


def test_a_gated_model_says_where_its_licence_is(home: Home) -> None:
    home.hub.models["acme/gated"] = Shared({"main": CONFIG}, gated=True)
    for token in ("", TOKEN):
        sentence = home.refused("acme/gated", HF_TOKEN=token)
        assert f"{home.hub.address}/acme/gated" in sentence
        assert "HF_TOKEN" in sentence


def test_a_missing_model_names_presets_that_were_perhaps_meant(home: Home) -> None:
    for token in ("", TOKEN):
        sentence = home.refused("Qwen/Qwen3-8Bx", HF_TOKEN=token)
        assert home.hub.address in sentence
        assert "'qwen3-8b'" in sentence
    home.hub.models["acme/weights"] = Shared({"main": b""})
    assert "config.json" in home.refused("acme/weights")


def test_a_private_model_is_found_with_a_token_which_only_the_hub_gets(home: Home) -> None:
    config = {"acme/private": Shared({"main": CONFIG}, private=True)}
    with serving_hub({"acme/private": Shared({"main": CONFIG})}) as other:
        # Another host: its name is compared, not its address.
        elsewhere = other.address.replace("127.0.0.1", "localhost")
        config["acme/private"].elsewhere = elsewhere
        home.hub.models |= config
        (found,) = home.look_up("acme/private", HF_TOKEN=TOKEN)
        assert (Path(found["config"]) / "config.json").read_bytes() == CONFIG
        assert {asked.token for asked in home.hub.asked} == {TOKEN}
        assert [asked.token for asked in other.asked if asked.method == "GET"] == [""]
        assert {asked.token for asked in other.asked} == {""}


def test_a_file_that_says_it_is_huge_is_not_downloaded(home: Home) -> None:
    home.hub.models["acme/huge"] = Shared({"main": CONFIG}, told=2**40, endless=True)
    assert f"{LARGEST_CONFIG_BYTES:,}" in home.refused("acme/huge")
    assert {asked.method for asked in home.hub.asked} == {"HEAD"}


def test_a_file_that_does_not_end_is_given_up(home: Home) -> None:
    home.hub.models["acme/endless"] = Shared({"main": b" " * 2**20}, told=None, endless=True)
    assert f"{LARGEST_CONFIG_BYTES:,}" in home.refused("acme/endless")
    kept = [path for path in home.folder.glob("hf/**/*") if path.is_file()]
    assert sum(path.stat().st_size for path in kept) < 2**16


HOSTILE = {
    "deep": b'{"a": ' * 20_000,
    "list": b"[1, 2]",
    "text": b"<html>log in</html>",
    "layers": b'{"model_type": "llama", "num_hidden_layers": 1' + b"0" * 5000 + b"}",
    "colour": CONFIG.replace(b'"silu"', b'"\\u001b[31mred"'),
}


def test_hostile_files_are_refused_as_local_ones_are(home: Home, tmp_path: Path) -> None:
    for kind, content in HOSTILE.items():
        home.hub.models[f"acme/{kind}"] = Shared({"main": content})
    found = home.look_up(*(f"acme/{kind}" for kind in HOSTILE))
    for kind, refused in zip(HOSTILE, found, strict=True):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "config.json").write_bytes(HOSTILE[kind])
        with pytest.raises(SpecError) as error:
            find_model(str(folder))
        assert len(error.value.problems) == len(refused["problems"]) == 1
    done = home.python(COMMAND, "estimate", "--model", "acme/colour", "--cluster", "8xH100-SXM")
    assert done.returncode == 2
    assert "31mred" in done.stderr
    assert "\x1b" not in done.stderr


@pytest.mark.nightly
def test_code_of_a_model_is_never_run(home: Home) -> None:
    code = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    mine = {"model_type": "mine", "architectures": ["MineForCausalLM"], "auto_map": code}
    home.hub.models["acme/mine"] = Shared({"main": json.dumps(mine).encode()})
    pytest.importorskip("transformers")
    done = home.python(COMMAND, "estimate", "--model", "acme/mine", "--cluster", "8xH100-SXM")
    assert done.returncode == 2
    assert "never run" in done.stderr
    assert not [asked for asked in home.hub.asked if "mine.py" in asked.path]
    assert home.downloaded() == ["config.json"]


@pytest.mark.nightly
def test_a_run_trains_a_model_of_a_hub_and_downloads_no_more(home: Home, tmp_path: Path) -> None:
    for package in ("torch", "transformers"):
        pytest.importorskip(package)
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}  # fmt: skip
    config = json.dumps({**json.loads(CONFIG), **sizes}).encode()
    home.hub.models["acme/Tiny"] = Shared({"main": config})
    (tmp_path / "run.toml").write_text(
        'model = "acme/Tiny"\ncluster = "1x2xCPU"\n[job]\nseq_len = 32\nglobal_batch = 128\n'
        "[train]\nsteps = 2\nmeasure = false\n"
    )
    done = home.python(COMMAND, "train", "run.toml")
    assert done.returncode == 0, done.stderr
    assert "Done after 2 steps" in done.stdout
    assert {asked.path.rpartition("/")[2] for asked in home.hub.asked} == {"config.json"}
    assert home.downloaded() == ["config.json"]


def test_a_name_that_was_not_looked_up_before_a_build_is_looked_up_after_it(home: Home) -> None:
    """Building a model keeps libraries offline; that is not what the user asked for."""
    pytest.importorskip("transformers")
    code = "from shardwise.spec.hub import stay_offline; stay_offline()\n"
    check = """
from huggingface_hub import constants
assert constants.is_offline_mode()
"""
    done = home.python(f"{code}{LOOK_UP}{check}", NAME, HF_HUB_OFFLINE="0")
    assert done.returncode == 1  # the user had said 0
    kept = "import os; del os.environ['HF_HUB_OFFLINE']\n"
    done = home.python(f"{kept}{code}{LOOK_UP}{check}", NAME)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["name"] == "Small-1B"


def test_presets_and_local_folders_win_without_a_hub(home: Home, tmp_path: Path) -> None:
    folder = tmp_path / "Qwen" / "Qwen3-8B"
    hub_model, again = "meta-llama/Meta-Llama-3-8B", "META-LLAMA/meta-llama-3-8b"
    found = home.look_up(hub_model, again, "Qwen/Qwen3-8B")
    assert [one["name"] for one in found] == ["llama-3-8b", "llama-3-8b", "qwen3-8b"]
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(CONFIG)
    assert home.look_up("Qwen/Qwen3-8B")[0]["config"] == str(folder)
    assert not home.hub.asked
    # A revision is asked for.
    home.hub.models[hub_model] = Shared({"v2": OTHER})
    assert Path(home.look_up(f"{hub_model}@v2")[0]["config"]).name == commit_of(OTHER)


def test_a_run_file_names_a_model_of_a_hub(home: Home, tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    for model in (f'"{NAME}"', f'{{ config = "{NAME}" }}', '"llama-3-8b"'):
        run.write_text(f'model = {model}\ncluster = "8xH100-SXM"\n')
        # The last one is asked for with the option, which is no path.
        words = [NAME] if model == '"llama-3-8b"' else []
        assert home.python(READ_RUN, str(run), *words).stdout == "Small-1B\n"
    run.write_text(f'model = {{ pretrained = "{NAME}" }}\ncluster = "8xH100-SXM"\n')
    assert f"hf download {NAME}" in home.python(READ_RUN, str(run)).stderr


@pytest.mark.parametrize(
    "text",
    ["../x/y", "a/b/c", "./a/b", "/a/b", "a/..", "a/b@../c", "a/b@/c", "a//b", "a/b.json", "a/b@",
     "-a/b", "a/b--c", "a/b@-c", "a\\b/c", "a/b?x=1", "a/b#c", "a/b%2fc", "a/é", "a/b\n", "a b/c",
     "a/" + "b" * 97, "a/b@" + "c" * 97, "llama-3-8b", ""],
)  # fmt: skip
def test_what_is_like_a_path_is_no_name(text: str) -> None:
    assert hub_name(text) is None


def test_names_have_an_owner_and_perhaps_a_revision() -> None:
    assert hub_name("Qwen/Qwen3-8B") == HubName("Qwen/Qwen3-8B")
    assert hub_name("a/b.c-d_e@refs/pr/1") == HubName("a/b.c-d_e", "refs/pr/1")


def test_no_two_presets_have_one_name_on_a_hub() -> None:
    names = [name for preset in catalogue.model_names() for name in catalogue.hub_names(preset)]
    assert len({name.lower() for name in names}) == len(names)
    assert all(hub_name(name) for name in names)
