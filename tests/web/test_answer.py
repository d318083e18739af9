"""Answers of a page are those of the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.planning.api import plan_run
from shardwise.step.memory_words import show_memory
from shardwise.web.answer import answer
from shardwise.web.catalogue import catalogue
from tests.command import environment, shardwise
from tests.gate import first_in_gate

CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}


def ask(**question: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer(json.dumps(question)))
    return found


@pytest.mark.parametrize(
    ("question", "options"),
    first_in_gate(2, [
        ({}, []),
        ({"seq_len": 8192, "global_batch": "4Mi"}, ["--seq-len", "8192", "--global-batch", "4Mi"]),
        ({"adapter": "qlora:16"}, ["--adapter", "qlora:16"]),
        ({"objective": "memory", "exact_batch": True}, ["--objective", "memory", "--exact-batch"]),
        (
            {"tokens": "1T", "price": 2.5, "deadline": 3},
            ["--tokens", "1T", "--price", "2.5", "--deadline", "3"],
        ),
        ({"for_stack": "DeepSpeed"}, ["--for", "deepspeed"]),
        ({"optimizer": "adamw-8bit", "compile": True}, ["--optimizer", "adamw-8bit", "--compile"]),
    ]),
)  # fmt: skip
def test_a_plan_is_that_of_the_command_line(
    question: dict[str, object], options: list[str]
) -> None:
    where = {"model": "llama-3-8b", "cluster": "2x8xH100-SXM@400Gbps"}
    found = ask(ask="plan", **where, **question)
    words = [part for name, value in where.items() for part in (f"--{name}", value)]
    printed = shardwise("plan", *words, *options, "--json")
    assert found["problems"] == []
    assert found["json"] + "\n" == printed.stdout
    assert found["exit_code"] == printed.returncode


def test_a_plan_names_the_command_that_prints_it() -> None:
    asked: dict[str, object] = {"model": "llama-3-8b", "cluster": "8xA100-80GB", "seq_len": 2048}
    asked |= {"tokens": "2B", "compile": True, "low_precision_reduce": True}
    found = ask(ask="plan", **asked)
    words = found["command"].split()
    assert words[0] == "shardwise"
    printed = shardwise(*words[1 : words.index("-o")], "--json")
    assert found["json"] + "\n" == printed.stdout


def test_a_chosen_run_is_the_run_toml_that_trains(tmp_path: Path) -> None:
    found = ask(ask="plan", model="llama-3-8b", cluster="8xH100-SXM")
    written = tmp_path / "run.toml"
    written.write_text(found["run"], encoding="utf-8")
    printed = shardwise("estimate", str(written), "--json")
    estimated = json.loads(printed.stdout)
    assert estimated["time"]["step_s"] == pytest.approx(found["figures"]["step_s"])
    assert estimated["memory"]["needed_bytes"] == found["figures"]["needed_bytes"]


def test_an_estimate_is_that_of_the_command_line() -> None:
    found = ask(ask="estimate", model="llama-3-8b", cluster="8xH100-SXM", strategy="zero2")
    words = ["--model", "llama-3-8b", "--cluster", "8xH100-SXM", "--strategy", "zero2"]
    printed = shardwise("estimate", *words, "--json")
    assert found["json"] + "\n" == printed.stdout
    assert found["exit_code"] == printed.returncode


@pytest.mark.parametrize("strategy", ["zero2", {"kind": "zero2"}])
def test_a_moved_configuration_keeps_its_kind_and_the_precision(strategy: object) -> None:
    asked = {"ask": "estimate", "model": "llama-3-8b", "precision": "fp32", "timeline": False}
    where = {"cluster": "2x8xH100-SXM@400Gbps", "change": {"network": "200"}}
    found = ask(**asked, **where, strategy=strategy)
    words = ["--model", "llama-3-8b", "--cluster", "2x8xH100-SXM@200Gbps", "--precision", "fp32"]
    printed = shardwise("estimate", *words, "--strategy", "zero2", "--json")
    assert found["json"] + "\n" == printed.stdout


def test_the_bar_of_memory_ends_where_the_verdict_says() -> None:
    found = ask(ask="estimate", model="llama-3-8b", cluster="8xH100-SXM", strategy="zero3")
    memory = json.loads(found["json"])["memory"]
    drawn = found["html"]["memory"]
    assert memory["needed_bytes"] > memory["peak_allocated_bytes"]
    assert f"<b>{show_memory(memory['needed_bytes'])}</b>" in drawn
    # The line is the limit that the verdict compares with.
    assert f"usable {show_memory(memory['usable_bytes'])}</span>" in drawn
    share = memory["usable_bytes"] / max(memory["needed_bytes"], memory["usable_bytes"])
    assert f"--at:{share:.5f}" in drawn


def test_a_pasted_configuration_is_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "custom"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    found = ask(ask="plan", model=json.dumps(CONFIG), cluster="8xH100-SXM")
    printed = shardwise(
        "plan", "--model", str(folder / "config.json"), "--cluster", "8xH100-SXM", "--json"
    )
    assert found["json"] + "\n" == printed.stdout


def test_a_model_of_a_hub_has_its_name_and_its_configuration(tmp_path: Path) -> None:
    """The browser has fetched it; its name is kept, for the command."""
    (tmp_path / "Small-1B").mkdir()
    (tmp_path / "Small-1B" / "config.json").write_text(json.dumps(CONFIG))
    question = {"model": "acme/Small-1B@v2", "cluster": "8xH100-SXM"}
    found = ask(ask="plan", config=json.dumps(CONFIG), **question)
    words = ["--model", "Small-1B", "--cluster", "8xH100-SXM", "--json"]
    # A path, though it has no slash: it is there.
    printed = json.loads(shardwise("plan", *words, folder=tmp_path).stdout)
    assert json.loads(found["json"])["layouts"] == printed["layouts"]
    assert "--model acme/Small-1B@v2 " in found["command"]
    assert '"Small-1B"' in found["run"]
    preset = ask(ask="estimate", model="Qwen/Qwen3-8B", cluster="8xH100-SXM")
    assert (
        preset["figures"] == ask(ask="estimate", model="qwen3-8b", cluster="8xH100-SXM")["figures"]
    )


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("acme/Small-1B", None),
        ("acme/Small-1B", "<html>log in</html>"),
        ("acme/Small-1B", "[1]"),
        ("acme/Small-1B", '{"a": ' * 20_000),
        ("acme/Small-1B", '{"model_type": "llama"}'),
        ("../etc/passwd", json.dumps(CONFIG)),
        (None, json.dumps(CONFIG)),
    ],
)
def test_a_model_of_a_hub_is_checked_as_a_pasted_one(model: str, config: str | None) -> None:
    found = ask(ask="plan", model=model, config=config, cluster="8xH100-SXM")
    assert found["exit_code"] == 2
    assert found["problems"]


def test_every_problem_is_told_in_the_words_of_the_command_line() -> None:
    asked = {"model": "llama-3-70x", "cluster": "8xH100-SXN", "seq_len": "x"}
    found = ask(ask="plan", **asked)
    words = ["--model", "llama-3-70x", "--cluster", "8xH100-SXN", "--seq-len", "x"]
    printed = shardwise("plan", *words)
    assert [f"error: {problem}" for problem in found["problems"]] == printed.stderr.splitlines()
    assert found["exit_code"] == printed.returncode == 2


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '"plan"', '{"ask": "steal"}', '{"ask": "plan", "run": "x.toml"}', "[" * 9000],
)
def test_what_is_not_a_question_gets_a_sentence(text: str) -> None:
    found = json.loads(answer(text))
    assert found["exit_code"] == 2
    assert found["problems"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "/etc/passwd"),
        ("model", "./model"),
        ("model", "os.path:join"),
        ("cluster", "/etc/hosts.toml"),
        ("model", '{"model_type": "<script>alert(1)</script>"}'),
        ("model", '{"model_type": 7, "hidden_size": []}'),
        ("cluster", '{"device": {"name": "<b>"}}'),
        ("adapter", "<i>:4"),
    ],
)
def test_nothing_is_read_or_imported_for_a_question(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").write_text("secret", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    found = ask(**{"ask": "plan", "model": "llama-3-8b", "cluster": "8xH100-SXM", name: value})
    assert found["exit_code"] == 2
    assert "secret" not in json.dumps(found)


def test_names_of_others_stay_text() -> None:
    table = {"device": "H100-SXM", "nodes": 1, "devices_per_node": 8}
    device: dict[str, Any] = {"name": "<img src=x>", "memory": "80GiB", "memory_bandwidth": "3TB/s"}
    device |= {"link_bandwidth": "450GB/s", "peak": {"bf16": "900TFLOPS"}}
    found = ask(ask="plan", model="llama-3-8b", cluster=json.dumps({**table, "device": device}))
    assert found["problems"] == []
    assert "<img" not in "".join(found["html"].values())
    assert "&lt;img src=x&gt;" in found["html"]["about"]


def test_a_moved_slider_changes_the_question() -> None:
    asked = {"model": "llama-3-8b", "cluster": "4x8xH100-SXM@400Gbps"}
    moved = ask(ask="plan", **asked, change={"network": "100", "seq-len": "8192"})
    straight = ask(ask="plan", model="llama-3-8b", cluster="4x8xH100-SXM@100Gbps", seq_len=8192)
    assert moved["json"] == straight["json"]


def test_what_changed_is_told_with_both_values() -> None:
    asked = {"ask": "estimate", "model": "llama-3-8b", "cluster": "8xH100-SXM", "strategy": "zero3"}
    before = ask(**asked)
    after = ask(**asked, recompute="full", before=before["figures"])
    assert after["figures"]["step_s"] > before["figures"]["step_s"]
    assert "→" in after["html"]["changed"]
    assert "Nothing changed" in ask(**asked, before=before["figures"])["html"]["changed"]


def test_a_curve_has_a_point_for_each_value() -> None:
    asked = {"model": "llama-3-8b", "cluster": "4x8xH100-SXM@400Gbps", "vary": "network"}
    found = ask(ask="curve", **asked, values=["50", "100", "400"])
    speeds = [point["tokens_per_s"] for point in found["points"]]
    assert len(speeds) == 3
    assert speeds == sorted(speeds)
    assert found["html"]["curve"].count("<circle") >= 3


def test_a_run_is_exported_as_the_command_line_does(tmp_path: Path) -> None:
    planned = ask(ask="plan", model="llama-3-8b", cluster="8xH100-SXM")
    (tmp_path / "run.toml").write_text(planned["run"], encoding="utf-8")
    printed = shardwise("export", str(tmp_path / "run.toml"), "--to", "axolotl")
    found = ask(
        ask="export", model="llama-3-8b", cluster="8xH100-SXM", strategy=planned["strategy"],
        to="axolotl",
    )  # fmt: skip
    assert found["export"]["text"] == printed.stdout


def test_planning_imports_neither_screens_nor_traces_nor_torch() -> None:
    code = (
        "import json, sys\n"
        "from shardwise.web.answer import answer\n"
        "asked = dict(ask='plan', model='llama-3-8b', cluster='8xH100-SXM', adapter='lora:8')\n"
        "assert json.loads(answer(json.dumps(asked)))['exit_code'] == 0\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment()
    )
    loaded = set(done.stdout.split())
    assert "numpy" in loaded
    assert not loaded & {"msgspec", "yaml", "rich", "typer", "torch"}


@pytest.mark.parametrize(
    ("settings", "extra"),
    [({}, "hf"), ({"adapter": "qlora:16"}, "adapters"), ({"optimizer": "adamw-8bit"}, "adapters")],
)
def test_a_run_says_what_to_install_and_what_to_set_before(
    settings: dict[str, str], extra: str
) -> None:
    found = ask(ask="plan", model="llama-3-8b", cluster="8xH100-SXM", **settings)
    assert found["install"] == f'pip install "shardwise[{extra}]"'
    assert "pretrained = false" in found["run"]
    for said in ("random weights", "pretrained =", "synthetic tokens", "[data]"):
        assert said in found["before"]


def test_what_would_fit_names_its_host_memory_and_its_command() -> None:
    verdict = ask(ask="plan", model="llama-3-70b", cluster="1xH100-SXM")["html"]["verdict"]
    for said in ("No configuration fits", "--offload", "of host memory", "shardwise estimate"):
        assert said in verdict


def test_an_instance_is_found_without_files_or_torch() -> None:
    asked = {"model": "llama-3-8b", "cluster": "2xa3-megagpu-8g", "tokens": "1T"}
    code = (
        "import json, sys; from shardwise.web.answer import answer; "
        "found = json.loads(answer(sys.argv[1])); "
        "print(json.dumps([found['problems'], found['json'], 'torch' in sys.modules]))"
    )
    question = json.dumps({"ask": "plan", **asked})
    done = subprocess.run(
        [sys.executable, "-c", code, question],
        env=environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    problems, found, with_torch = json.loads(done.stdout)
    assert (problems, with_torch) == ([], False)
    words = [part for name, value in asked.items() for part in (f"--{name}", value)]
    assert found.strip() == shardwise("plan", *words, "--json").stdout.strip()
    assert json.loads(found)["list_price"]["instance"] == "a3-megagpu-8g"
    offered = {one["name"]: one for one in catalogue()["instances"]}
    assert offered["p5.48xlarge"]["device"] == "H100-SXM"


@pytest.mark.parametrize(("cluster", "adapter"), [("1xRTX-4090", "qlora:16"), ("8xRTX-4090", None)])
def test_a_page_warns_before_it_gives_reasons(cluster: str, adapter: str | None) -> None:
    asked: dict[str, Any] = {"model": "llama-3-8b", "cluster": cluster, "adapter": adapter}
    warned = [one.words() for one in plan_run(**asked)[0].warnings]
    html = ask(ask="plan", **asked)["html"]
    said = re.findall("<p>(.*?)</p>", html["verdict"])
    assert warned
    assert said[1 : 1 + len(warned)] == warned
    assert not any(words in html.get("why", "") for words in warned)


def test_layouts_are_estimated_on_what_the_search_chose() -> None:
    asked = {"model": "llama-3-8b", "cluster": "8xH100-SXM", "tokens": "1B"}
    plan = ask(ask="plan", objective="sequence", **asked)
    assert plan["at"]["seq-len"] == 4096
    assert int(plan["searched"]["seq-len"]) > 4096
    best = plan["layouts"][0]
    again = ask(ask="estimate", strategy=best["strategy"], change=plan["searched"], **asked)
    assert again["figures"]["step_s"] == pytest.approx(plan["figures"]["step_s"])
    assert again["html"]["cost"] in plan["html"]["cost"]


def test_sliders_stand_at_the_question_after_they_moved() -> None:
    asked = {"ask": "plan", "model": "llama-3-8b", "cluster": "2x8xH100-SXM@400Gbps"}
    assert ask(**asked, change={"network": "100"})["at"] == ask(**asked)["at"]


def test_a_step_of_a_million_micro_batches_has_no_timeline() -> None:
    where = {"model": "gpt2", "cluster": "8xH100-SXM"}
    plan = ask(ask="plan", **where, global_batch="1T")
    estimate = ask(ask="estimate", **where, strategy=plan["strategy"])
    for found in (plan, estimate):
        assert "micro-batches" in found["html"]["timeline"]
        assert found["figures"]
    assert "timeline" not in ask(
        ask="estimate", **where, strategy=plan["strategy"], timeline=False
    )["html"]  # fmt: skip
    words = ["--model", "gpt2", "--cluster", "8xH100-SXM", "--global-batch", "1T"]
    assert plan["json"] + "\n" == shardwise("plan", *words, "--json").stdout
