"""A setting is the same on the command line, in Python and on the page."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any, cast, get_args, get_type_hints

import pytest
import typer

from shardwise.cli.estimate import estimate
from shardwise.cli.plan import plan
from shardwise.cli.settings import SETTINGS
from shardwise.cli.whatif import whatif
from shardwise.spec.question import describe_run
from shardwise.spec.settings import PlanSettings, RunSettings
from shardwise.web.command import plan_command
from shardwise.web.options import FLAGS as FLAGS_OF_PAGE
from shardwise.web.options import SHOWN, VALUES
from shardwise.web.question import Question

# Arguments of the Python functions that are no keywords among `**settings`.
ARGUMENTS = {"model", "cluster", "strategy", "measured"}
# Flags of the keyword `offload`.
FLAGS = {"offload_optimizer", "offload_activations"}


def options(command: Any) -> Any:
    application = typer.Typer()
    application.command()(command)
    return typer.main.get_command(application)


def names(command: Any) -> set[str]:
    return {parameter.name for parameter in options(command).params}


def literals(of: Any) -> set[str]:
    """The words that a keyword's type allows."""
    inner = [one for part in get_args(of) for one in (part, *get_args(part))]
    return {one for one in inner if isinstance(one, str)}


@pytest.mark.parametrize(
    ("command", "keywords"), [(plan, PlanSettings), (whatif, PlanSettings), (estimate, RunSettings)]
)
def test_options_are_keywords_of_python(command: Any, keywords: Any) -> None:
    taken = names(command) & {*SETTINGS} - ARGUMENTS - FLAGS
    if command is whatif:
        taken -= {"micro_batch", "recompute"}  # of --fixed
    assert taken
    assert taken <= {*get_type_hints(keywords)}


@pytest.mark.parametrize("name", ["optimizer", "precision", "states", "loss"])
def test_completed_words_are_those_that_python_takes(name: str) -> None:
    words = SETTINGS[name].completes
    assert isinstance(words, tuple)
    assert {*words} == literals(get_type_hints(PlanSettings)[name])


def test_the_page_asks_what_the_command_line_has() -> None:
    """Every field of a question of the page that is a setting, and the command that it shows."""
    fields = {*Question.model_fields}
    assert fields & {*get_type_hints(RunSettings)} <= {*SETTINGS}
    # What a plan of the command line takes, the page takes; it measures nothing.
    assert names(plan) & {*SETTINGS} - FLAGS - {"measured"} <= fields
    everything = {
        "model": "llama-3-8b", "cluster": "8xH100-SXM", "seq_len": 4096, "global_batch": "4M",
        "optimizer": "lion", "adapter": "lora:8", "precision": "fp8", "software": "torch-2.13",
        "loss": "fused", "states": "bf16", "offload": "optimizer", "compile": True,
        "objective": "memory", "exact_batch": True, "low_precision_reduce": True, "tokens": "1T",
        "price": 2.5, "deadline": 30.0, "for_stack": "trl",
    }  # fmt: skip
    for compiles in (True, False):
        asked = Question.read({"ask": "plan", **everything, "compile": compiles})
        words = plan_command(asked).split()[2:]
        # Reads all options, and runs nothing.
        read = options(plan).make_context("plan", words).params
        assert read["compile"] is (True if compiles else None)
        assert (read["model"], read["seq_len"], read["for_stack"]) == ("llama-3-8b", "4096", "trl")
        assert read["offload_optimizer"] is True


def test_the_form_of_the_page_offers_the_same_words() -> None:
    page = files("shardwise.web").joinpath("page", "index.html").read_text(encoding="utf-8")
    selects = re.findall(r'<select [^>]*name="([^"]+)"[^>]*>(.*?)</select>', page)
    offered = {name: set(re.findall(r"<option[^>]*>([^<]*)", content)) for name, content in selects}
    for name in ("precision", "states", "loss"):
        assert offered[name] == {*cast(tuple[str, ...], SETTINGS[name].completes)}
    known = {name for parameter in options(plan).params for name in parameter.opts}
    assert {*VALUES, *FLAGS_OF_PAGE, *SHOWN} <= known


def test_values_are_read_as_the_keyword_wants_them() -> None:
    """Through the command's own signature, as typer calls it."""
    from shardwise.cli.settings import takes

    got: dict[str, Any] = {}

    @takes("model", "precision", "recompute", "reshard_after_forward", "measured", "offload",
           "offload_optimizer", "offload_activations")  # fmt: skip
    def command(run: str = "", *, model: str | None = None, **settings: Any) -> None:
        got.update(settings, run=run, model=model)

    words = ["--model", "M", "--precision", "FP8", "--recompute", "50%", "--offload-optimizer",
             "--reshard-after-forward", "4", "--measured", "3s", "--measured", "4s"]  # fmt: skip
    options(command).main(words, standalone_mode=False)
    assert got == {"run": "", "model": "M", "precision": "fp8", "recompute": 0.5,
                   "reshard_after_forward": 4, "offload": "optimizer",
                   "measured": ["3s", "4s"]}  # fmt: skip
    described = describe_run("llama-3-8b", "8xH100-SXM", precision=got["precision"])
    assert described.strategy.linear_dtype == "fp8"
