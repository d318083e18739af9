"""The `shardwise` application: its commands, and how errors are reported."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Iterable
from importlib import import_module
from keyword import iskeyword
from typing import Any, TextIO

import typer
import typer.core

from shardwise.cli.examples import epilog
from shardwise.cli.long import DEBUG, wants_traceback
from shardwise.cli.usage import UsageError, usage_problem
from shardwise.progress import stages
from shardwise.spec.file_errors import is_wrong_name
from shardwise.spec.foreign_text import echo, echo_traceback, one_line
from shardwise.spec.record import SpecError, SpecWarning
from shardwise.version import __version__


class _Command(typer.core.TyperCommand):
    """A command whose help shows no type for flags."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        hide_flag_types(self.get_params(ctx))
        super().format_help(ctx, formatter)


class _Group(typer.core.TyperGroup):
    """The application, whose help shows no type for flags."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        hide_flag_types(self.get_params(ctx))
        super().format_help(ctx, formatter)


def hide_flag_types(parameters: Iterable[Any]) -> None:
    """Remove `<bool>` from the help of flags: they take no value."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""


app = typer.Typer(
    name="shardwise",
    cls=_Group,
    help="Which FSDP configuration should I run, what will it cost, and why is it slow?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    epilog="Exit codes: 0 done; 1 the answer is no (does not fit, check failed, slower), or an "
    "unexpected error; 2 invalid input; 3 training failed in a way that a restart would repeat.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
# The groups of --help, and each command in a line. A command is the function of its name in the
# module of its name.
GROUPS: dict[str, dict[str, str]] = {
    "Plan": {
        "plan": "Find the best configuration, and explain why it is the best",
        "estimate": "Predict memory, traffic and time of one configuration",
        "whatif": "Vary network, device, size or length and see what changes",
        "serve": "Open the planner as a page on this machine",
        "catalog": "List models, devices, measured kernels and accuracy",
        "calibrate": "Measure this machine or cluster for better predictions",
    },
    "Train": {
        "train": "Train a run.toml, and compare with the prediction",
        "rendezvous": "Serve the rendezvous of runs on several hosts",
        "doctor": "Check a run in miniature before it costs anything",
        "accept": "Check on this machine's devices what Shardwise promises",
        "compare": "Run several strategies for real; rank them by measured speed",
        "tune": "Benchmark the most promising configurations and keep the fastest",
    },
    "Analyse": {
        "profile": "Profile a few steps of a run.toml",
        "trace": "Explain profiler traces: compute, communication, stragglers",
        "diff": "Compare two runs or traces; exit 1 if the second is slower",
        "memory": "Analyse memory snapshots: peak, owners, leaks, fragmentation",
        "runs": "List, compare and query past runs of a folder or bucket",
        "report": "Write one HTML page about plans, runs and traces",
        "contribute": "Write what a run measured as one small file; send nothing",
    },
    "Checkpoints": {
        "fsck": "Verify a checkpoint's integrity",
        "export-weights": "Export weights for Hugging Face transformers",
    },
    "Interoperate": {
        "export": "Write a run for accelerate, DeepSpeed, torchtitan, Slurm, …",
        "import": "Read another stack's configuration as a run.toml",
    },
}
COMMANDS = tuple(name for commands in GROUPS.values() for name in commands)
# Characters of an unexpected error's own text.
MAX_DETAIL = 300


def _print_version(wanted: bool) -> None:
    if wanted:
        echo(f"shardwise {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", help="Print the version.", callback=_print_version, is_eager=True
    ),
    debug: bool = typer.Option(
        False, "--debug", help="Show the traceback of an error; so does SHARDWISE_DEBUG=1."
    ),
) -> None:
    """Which FSDP configuration should I run, what will it cost, and why is it slow?"""


def add_commands(names: Iterable[str] = COMMANDS) -> None:
    """Register these commands with the application."""
    for group, commands in GROUPS.items():
        for name in [name for name in commands if name in names]:
            function = name.replace("-", "_") + "_" * iskeyword(name)
            found = getattr(import_module(f"shardwise.cli.{function}"), function)
            app.command(
                name,
                cls=_Command,
                short_help=commands[name],
                epilog=epilog(name),
                rich_help_panel=group,
            )(found)


def run() -> None:
    """Run the command that was asked for, and exit with its code."""
    if "--debug" in sys.argv:
        # Anywhere on the line; the environment carries it to processes that a command starts.
        sys.argv.remove("--debug")
        os.environ[DEBUG] = "1"
    # Completion passes the words of the line in the environment.
    words = os.environ.get("COMP_WORDS", "").split() or sys.argv
    # Registering every command takes longer than the answer of one.
    add_commands(words[1:2] if set(words[1:2]) & set(COMMANDS) else COMMANDS)
    warnings.showwarning = print_warning
    try:
        # Outside of its standalone mode typer raises usage errors instead of framing them.
        sys.exit(_answer())
    except typer.Abort:
        sys.exit(130)  # Ctrl-C
    except UsageError as error:
        if type(error).__name__ != "NoArgsIsHelpError":  # which has printed the help
            echo(f"error: {one_line(usage_problem(error))}", err=True)
        sys.exit(2)
    except Exception as error:
        if wants_traceback():
            echo_traceback(error)
            sys.exit(1)
        for sentence in sentences(error):
            echo(f"error: {one_line(sentence)}", err=True)
        sys.exit(2 if is_bad_input(error) else 1)


def _answer() -> int:
    """Run the command; the line of its current stage is gone when this returns or raises."""
    try:
        return app(standalone_mode=False) or 0
    finally:
        stages.end()


def print_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning about the input as a note, and others in one line too."""
    if not issubclass(category, SpecWarning):
        echo(f"warning: {one_line(str(message))}", err=True)
    elif os.environ.get("RANK", "0") == "0":
        echo(f"note: {one_line(str(message))}", err=True)


def is_bad_input(error: Exception) -> bool:
    """Whether the user can mend it: a SpecError, or the wrong name of a file.

    A rank that fails in another way is started again: an I/O error may pass.
    """
    named = isinstance(error, OSError) and bool(error.filename)
    return isinstance(error, SpecError) or (named and is_wrong_name(error))


def sentences(error: Exception) -> list[str]:
    """What to print of an error: one sentence for each thing to change."""
    if isinstance(error, SpecError):
        return error.problems
    if isinstance(error, OSError) and error.filename:
        return [f"{error.filename}: {error.strerror or error}"]
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return [f"cannot write: {error.strerror}"]
    what = " ".join(str(error).split())
    kind = type(error).__name__
    return [
        f"unexpected {kind}: {what[:MAX_DETAIL] or 'no details'} (add --debug to see the traceback)"
    ]
