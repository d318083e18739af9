"""Help, completion and version, as a shell meets them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from shardwise.cli.help_examples import EXAMPLES
from shardwise.cli.main import COMMANDS, GROUPS, RENAMED, add_commands, app
from shardwise.spec.version import __version__
from tests.command import PATIENCE_S
from tests.screens import assert_screen


def shardwise(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("shardwise"), *words],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        env={**os.environ, "COLUMNS": "80", **environment},
    )  # fmt: skip


def completed(line: str) -> list[str]:
    """What bash would offer for the last word of a line."""
    done = shardwise(
        _SHARDWISE_COMPLETE="complete_bash",
        COMP_WORDS=line,
        COMP_CWORD=str(len(line.split()) - 1 + line.endswith(" ")),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture(scope="module")
def group() -> typer.core.TyperGroup:
    if not app.registered_commands:
        add_commands()
    found = typer.main.get_command(app)
    assert isinstance(found, typer.core.TyperGroup)
    return found


def test_version() -> None:
    assert shardwise("--version").stdout == f"shardwise {__version__}\n"


def test_every_command_has_examples_that_it_can_read(group: typer.core.TyperGroup) -> None:
    assert set(EXAMPLES) == set(COMMANDS) == set(group.commands)
    for name, examples in EXAMPLES.items():
        assert examples
        for line in examples.values():
            program, command, *words = shlex.split(line)
            assert (program, command) == ("shardwise", name)
            # Reads and checks all options, and runs nothing.
            group.commands[name].make_context(name, words)


def test_every_option_says_what_it_is(group: typer.core.TyperGroup) -> None:
    for name, command in group.commands.items():
        assert (command.help or "").split("\n")[0].endswith("."), name
        for parameter in command.params:
            told = getattr(parameter, "help", None)
            assert told, f"{name}: {parameter.name}"
            assert told.strip().endswith((".", "…")), f"{name}: {parameter.name}: {told}"


def test_a_former_name_works_and_says_the_new_one() -> None:
    for name, now in RENAMED.items():
        done = shardwise(name, "--help")
        assert done.returncode == 0
        assert f"'shardwise {now}'" in done.stderr
        assert f"shardwise {name} " in done.stdout
    assert not {*RENAMED} & {*COMMANDS}


def test_help_fits_a_terminal() -> None:
    for words in ([], ["plan"], ["export"]):
        done = shardwise(*words, "--help")
        assert done.returncode == 0
        assert max(map(len, done.stdout.splitlines())) <= 80


def test_help_of_every_command_takes_two_screens() -> None:
    for name in COMMANDS:
        assert len(shardwise(name, "--help").stdout.splitlines()) <= 2 * 40, name


def test_flags_show_no_type(group: typer.core.TyperGroup) -> None:
    for words in ([], *([name] for name in group.commands)):
        shown = CliRunner().invoke(app, [*words, "--help"]).stdout
        assert "--help" in shown
        assert "<bool>" not in shown


def test_commands_are_grouped(group: typer.core.TyperGroup) -> None:
    assert list(GROUPS) == ["Plan", "Train", "Analyse", "Checkpoints", "Interoperate"]
    assert len(set(COMMANDS)) == len(COMMANDS) == len(group.commands)
    for panel, commands in GROUPS.items():
        for name in commands:
            assert getattr(group.commands[name], "rich_help_panel") == panel  # noqa: B009
    assert_screen("help", shardwise("--help", NO_COLOR="1", TERM="dumb").stdout)


def test_completion_knows_the_catalogue() -> None:
    assert completed("shardwise cal") == ["calibrate"]
    assert "llama-3-8b" in completed("shardwise plan --model llama-3-")
    assert "4x8xH100-SXM" in completed("shardwise plan --cluster 4x8xH100")
    assert "4xp5.48xlarge" in completed("shardwise plan --cluster 4xp5.4")
    assert completed("shardwise export run.toml --to kub") == ["kubernetes"]
