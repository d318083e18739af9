"""The `shardwise` application: its commands, and how errors are reported."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from importlib import import_module
from keyword import iskeyword
from typing import Any, TextIO

import typer
import typer.core

from shardwise.cli.help_examples import example_lines
from shardwise.cli.long import DEBUG, wants_traceback
from shardwise.cli.usage import UsageError, usage_problem
from shardwise.spec.file_errors import is_wrong_name
from shardwise.spec.foreign_text import echo, echo_traceback, one_line
from shardwise.spec.progress import stages
from shardwise.spec.record import SpecError, SpecWarning
from shardwise.spec.version import __version__


class _Command(typer.core.TyperCommand):
    """A command whose help is plain lines: the boxes of typer take twice as many lines."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        hide_flag_types(self.get_params(ctx))
        self.rich_markup_mode = None
        super().format_help(ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if lines := example_lines(self.name or ""):
            formatter.write("\nExamples:\n" + "".join(f"{line}\n" for line in lines))


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
        "examples": "Write the examples of the documentation to ./examples",
        "calibrate": "Measure this machine or cluster for better predictions",
    },
    "Train": {
        "train": "Train or profile a run.toml, and compare with the prediction",
        "rendezvous": "Serve the rendezvous of runs on several hosts",
        "doctor": "Check a run in miniature, or this machine's devices",
        "compare": "Run several strategies for real; rank them by measured speed",
        "tune": "Benchmark the most promising configurations and keep the fastest",
    },
    "Analyse": {
        "trace": "Explain profiler traces, or compare two runs",
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
# Old names of commands that are now part of others. They work until the next release.
RENAMED = {
    "diff": "trace AFTER --against BEFORE",
    "profile": "train RUN --profile STEPS",
    "accept": "doctor",
}
# Most characters of the message of an unexpected error.
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
    """Register the commands in `names`, and renamed ones, with the application."""
    for group, commands in GROUPS.items():
        for name in [name for name in commands if name in names]:
            app.command(
                name,
                cls=_Command,
                short_help=commands[name],
                rich_help_panel=group,
            )(_load_command(name))
    for name in [name for name in RENAMED if name in names]:
        app.command(name, cls=_Command, hidden=True)(_load_command(name))


def _load_command(name: str) -> Callable[..., None]:
    """The function of a command, imported from its module."""
    function = name.replace("-", "_") + "_" * iskeyword(name)
    found: Callable[..., None] = getattr(import_module(f"shardwise.cli.{function}"), function)
    return found


def run() -> None:
    """Run the command on the command line, and exit with its code."""
    if "--debug" in sys.argv:
        # Accepted anywhere on the line; the environment passes it to child processes.
        sys.argv.remove("--debug")
        os.environ[DEBUG] = "1"
    # Completion passes the words of the line in the environment.
    words = os.environ.get("COMP_WORDS", "").split() or sys.argv
    # Registering every command would take longer than running one.
    asked = words[1:2]
    add_commands(asked if {*asked} & {*COMMANDS, *RENAMED} else COMMANDS)
    for name in asked:
        if name in RENAMED and sys.argv[1:2] == asked and os.environ.get("RANK", "0") == "0":
            echo(f"note: 'shardwise {name}' is now 'shardwise {RENAMED[name]}'", err=True)
    warnings.showwarning = print_warning
    try:
        # Outside of its standalone mode typer raises usage errors instead of framing them.
        sys.exit(_run_command())
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


def _run_command() -> int:
    """Run the command and return its exit code; always clears the progress line of its stage."""
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
    """Print a warning to stderr in one line; warnings about input are notes, on rank 0 only."""
    if not issubclass(category, SpecWarning):
        echo(f"warning: {one_line(str(message))}", err=True)
    elif os.environ.get("RANK", "0") == "0":
        echo(f"note: {one_line(str(message))}", err=True)


def is_bad_input(error: Exception) -> bool:
    """Whether the user can fix the error: a SpecError, or a wrong file name.

    A rank that fails in another way is restarted, because an I/O error may pass.
    """
    named = isinstance(error, OSError) and bool(error.filename)
    return isinstance(error, SpecError) or (named and is_wrong_name(error))


def sentences(error: Exception) -> list[str]:
    """The sentences to print for an error, one for each thing to change."""
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
