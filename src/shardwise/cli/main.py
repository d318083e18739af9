"""`shardwise`: the application, its commands, and how errors reach the user."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib import import_module
from keyword import iskeyword

import typer

from shardwise.cli.examples import epilog
from shardwise.cli.usage import UsageError, usage_problem
from shardwise.spec.record import SpecError
from shardwise.version import __version__

app = typer.Typer(
    name="shardwise",
    help="Which FSDP configuration should I run, what will it cost, and why is it slow?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    epilog="Exit codes: 0 done; 1 done, and the answer is no (it does not fit, a check failed, it "
    "became slower); 2 bad input, each problem in a sentence; 3 training that would fail again.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
# In the order of --help; each is the function of its name in the module of its name.
COMMANDS = (
    *("plan", "estimate", "whatif", "train", "profile", "doctor"),
    *("compare", "tune", "calibrate", "trace", "diff", "memory", "report"),
    *("export", "import", "fsck", "export-weights", "catalog"),
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardwise {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", help="Print the version.", callback=_print_version, is_eager=True
    ),
) -> None:
    """Which FSDP configuration should I run, what will it cost, and why is it slow?"""


def add_commands(names: Iterable[str] = COMMANDS) -> None:
    """Give the application these of its commands."""
    for name in names:
        function = name.replace("-", "_") + "_" * iskeyword(name)
        found = getattr(import_module(f"shardwise.cli.{function}"), function)
        app.command(name, epilog=epilog(name))(found)


def run() -> None:
    """Exit codes: 0 done, 1 done and the answer is no, 2 bad input."""
    # A shell that completes a line tells it in the environment.
    words = os.environ.get("COMP_WORDS", "").split() or sys.argv
    # Describing every command's options to typer takes longer than the answer of one.
    add_commands(words[1:2] if set(words[1:2]) & set(COMMANDS) else COMMANDS)
    try:
        # Outside of its standalone mode typer raises usage errors instead of framing them.
        sys.exit(app(standalone_mode=False) or 0)
    except UsageError as error:
        if type(error).__name__ != "NoArgsIsHelpError":  # which has printed the help
            typer.echo(f"error: {usage_problem(error)}", err=True)
        sys.exit(2)
    except SpecError as error:
        for problem in error.problems:
            typer.echo(f"error: {problem}", err=True)
        sys.exit(2)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        typer.echo(f"error: {where}{error.strerror or error}", err=True)
        sys.exit(2)
