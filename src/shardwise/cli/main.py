"""`shardwise`: the application, its commands, and how errors reach the user."""

from __future__ import annotations

import sys
from importlib import import_module

import typer

from shardwise.spec.record import SpecError
from shardwise.version import __version__

app = typer.Typer(
    name="shardwise",
    help="Which FSDP configuration should I run, what will it cost, and why is it slow?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# In the order of --help; each is the function of its name in the module of its name.
COMMANDS = (
    *("plan", "estimate", "whatif", "train", "profile", "doctor"),
    *("compare", "tune", "calibrate", "trace", "diff", "memory", "report"),
    *("fsck", "export-weights", "catalog"),
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


def run() -> None:
    """Exit codes: 0 done, 1 done and the answer is no, 2 bad input."""
    # Describing every command's options to typer takes longer than the answer of one.
    for name in sys.argv[1:2] if set(sys.argv[1:2]) & set(COMMANDS) else COMMANDS:
        function = name.replace("-", "_")
        app.command()(getattr(import_module(f"shardwise.cli.{function}"), function))
    try:
        app()
    except SpecError as error:
        for problem in error.problems:
            typer.echo(f"error: {problem}", err=True)
        sys.exit(2)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        typer.echo(f"error: {where}{error.strerror or error}", err=True)
        sys.exit(2)
