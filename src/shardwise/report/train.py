"""The screen of `shardwise train`: header, progress, and prediction against measurement."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from shardwise.report.compare import comparison_table
from shardwise.report.screen import screen
from shardwise.report.trend import trend
from shardwise.spec.progress import stages
from shardwise.spec.quantity import GIB, show_count, show_gib, show_seconds
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy_words import run_words
from shardwise.step.profile import StepProfile

if TYPE_CHECKING:
    from shardwise.checkpoint.dcp.load import Loaded
    from shardwise.trainer.data.packing import DataStatistics
    from shardwise.trainer.run import Result


# How the auxiliary loss of a mixture's routers is computed, if there is one.
_BALANCE = {
    "local": "Auxiliary loss of routers: each rank's own share of tokens per expert",
    "global": "Auxiliary loss of routers: one over a micro-batch of all ranks",
}
# Bars of the curve of losses at the end of a run, on a terminal.
_CURVE = 40


class TrainScreen:
    """Prints the log lines of a run; on a terminal, a live bar below counts steps.

    Log lines are as wide as a terminal at most: what does not fit is left out.
    `resume_command` is printed if a signal stops the run.
    """

    def __init__(self, resume_command: str = "") -> None:
        self._out = screen()
        self._resume_command = resume_command
        self._bar: _StepBar | None = None
        self._total = 0
        self._unit = "tokens/s"
        self._losses: list[float] = []
        self._held_out: list[float] = []

    def started(
        self,
        run: RunSpec,
        predicted: StepProfile,
        folder: Path,
        loaded: Loaded | None,
        data: DataStatistics | None = None,
        completed_steps: Callable[[], int] = lambda: 0,
    ) -> None:
        """Print the header before the first step: model, settings, memory, data, folder.

        `loaded` is the checkpoint that the run resumes from. `completed_steps` feeds the live bar.
        """
        stages.end()
        out = self._out
        assert run.train is not None
        self._total = run.train.steps
        # Not wrapped, so that names can be copied.
        for reason in loaded.skipped if loaded else []:
            out.print(f"Skipped corrupt checkpoint {reason}", style="yellow", soft_wrap=True)
        if loaded is not None:
            out.print(f"Resuming from step {loaded.manifest.step:,} of {folder}", soft_wrap=True)
        devices = run.cluster.devices
        is_cpu = run.cluster.device.is_cpu
        kind = "CPU process" if is_cpu else run.cluster.device.name
        out.print(
            Text(f"{predicted.model['name']}", style="bold")
            + Text(f" ({show_count(predicted.model['parameters'])} parameters)")
            + Text(f" on {devices} {kind}{'es' if is_cpu and devices > 1 else ''}")
        )
        out.print(run_words(run), style="dim")
        if run.train.balance_loss != "none":
            out.print(_BALANCE[run.train.balance_loss], style="dim")
        memory = predicted.known_memory
        assert memory.capacity_bytes is not None
        assert memory.usable_bytes is not None
        out.print(
            f"Predicted peak memory: {_size(memory.peak_allocated_bytes)} of "
            f"{show_gib(memory.capacity_bytes)} per {'process' if is_cpu else 'GPU'} "
            f"(usable {show_gib(memory.usable_bytes)})"
        )
        for line in data_lines(data) if data is not None else []:
            out.print(line)
        self._unit = "tokens/s" if data is None else "loss tokens/s"
        out.print(f"Run folder: {folder}", soft_wrap=True)
        out.print()
        if out.is_terminal:
            self._bar = _StepBar(out, self._total, completed_steps)
            self._bar.start()
        else:
            stages.begin("First step: compiling" if run.strategy.compile else "First step")

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        """Print a log line: loss, gradient norm, throughput and seconds per step.

        On a terminal, it has the memory of rank 0 too.
        """
        stages.end()
        self._losses.append(values["loss"])
        rate = values.get("tokens_per_s")
        fields = [
            self._step(step),
            f"loss {values['loss']:.4f}",
            f"grad norm {values['gradient_norm']:.3f}",
            f"{self._rate(rate)} {self._unit}" if rate else "",
        ]
        if "step_s" in values:
            fields.append(f"{show_seconds(values['step_s'])}/step")
        if values["skipped"]:
            fields.append(f"{values['skipped']:.0f} skipped")
        memory = values.get("memory_peak_bytes", values.get("resident_bytes"))
        if self._out.is_terminal and memory is not None:
            fields.append(f"{memory / GIB:.1f} GiB")
        self._print_line(fields)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Print a line of the held-out loss: perplexity, tokens and seconds."""
        stages.end()
        self._held_out.append(values["eval_loss"])
        self._print_line(
            [
                self._step(step),
                f"held-out loss {values['eval_loss']:.4f}",
                f"perplexity {values['eval_perplexity']:,.2f}",
                f"{values['eval_tokens']:,.0f} tokens",
                show_seconds(values["eval_s"]),
            ]
        )

    def _step(self, step: int) -> str:
        return f"step {step:>{len(str(self._total))}}/{self._total}"

    def _rate(self, rate: float) -> str:
        """A throughput; on a terminal, thousands as k to save columns."""
        short = self._out.is_terminal and rate >= 10_000
        return f"{rate / 1000:,.0f}k" if short else f"{rate:,.0f}"

    def _print_line(self, fields: Sequence[str]) -> None:
        """Print the fields in a line; on a terminal, those that fit."""
        if self._out.is_terminal:
            columns = shutil.get_terminal_size().columns
            fields = [field for field in fields if field]
            while len(fields) > 1 and len("  ".join(fields)) > columns:
                fields = fields[:-1]
        self._out.print("  ".join(fields), soft_wrap=True)

    def ended(self, result: Result) -> None:
        """Print why the run ended, then prediction against measurement."""
        self.close()
        out = self._out
        if result.reason == "resizing":
            return  # the launcher says so, for all hosts
        self._print_curves()
        if result.reason == "stopped":
            out.print(_stopped(result, self._resume_command), soft_wrap=True)
        else:
            reason = "Done" if result.reason == "done" else "Data exhausted"
            loss = result.last.get("loss")
            ending = Text(f"{reason} after {result.steps:,} steps", style="bold")
            out.print(ending + Text(f", loss {loss:.4f}" if loss else ""))
        if result.best is not None:
            best = result.best
            kept = f"Lowest held-out loss {best.eval_loss:.4f} after step {best.step:,}"
            out.print(f"{kept}: {best.checkpoint}", soft_wrap=True)
        if result.predicted is not None and result.measured is not None:
            out.print()
            out.print(comparison_table(result.predicted, result.measured))
            if result.measured.memory is None:
                out.print("\nMemory was not measured: with compile this needs a GPU.")

    def _print_curves(self) -> None:
        """On a terminal, print the losses of the log lines and of evaluations as curves."""
        for name, losses in (("loss", self._losses), ("held out", self._held_out)):
            if self._out.is_terminal and len(losses) > 1:
                curve = trend(losses, min(_CURVE, self._out.width - 30))
                ends = f"{losses[0]:.4f} → {losses[-1]:.4f}"
                self._out.print(f"{name:8}  {curve}  {ends}", no_wrap=True, overflow="crop")

    def close(self) -> None:
        """Remove the live bar or line; also called when a run fails."""
        stages.end()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class _StepBar(Progress):
    """A live bar of completed steps on the last line of a terminal.

    A thread reads `completed_steps` twice per second, so the training loop does no work for it.
    """

    def __init__(self, out: Console, total: int, completed_steps: Callable[[], int]) -> None:
        super().__init__(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("elapsed,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=out,
            transient=True,
            refresh_per_second=2,
            speed_estimate_period=600,
        )
        self._completed_steps = completed_steps
        self._task = self.add_task("", total=total, completed=completed_steps())

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.task_ids:
            self.update(self._task, completed=self._completed_steps())
        return super().get_renderables()


def data_lines(data: DataStatistics) -> list[str]:
    """Lines on the chat data: examples, tokens, lengths, and how full the sequences are."""
    counted = data.loss_tokens / data.tokens
    lines = [
        f"Data: {data.examples:,} examples, {data.tokens:,} tokens; {data.loss_tokens:,} count for "
        f"the loss ({counted:.0%})",
        f"Tokens per example: median {data.median:,}, 95th percentile {data.p95:,}, longest "
        f"{data.longest:,}",
        f"{'Packed' if data.packing else 'Padded'}: {data.sequences:,} sequences, "
        f"{data.filled:.1%} full (sequence length {data.seq_len:,})",
    ]
    if data.cut:
        lines.append(f"Cut: {data.cut:,} examples longer than {data.seq_len + 1:,} tokens")
    if data.dropped:
        lines.append(f"Dropped: {data.dropped:,} examples without a token that counts")
    return lines


def _stopped(result: Result, resume_command: str) -> str:
    """Sentence: which signal stopped the run, after which step, and how to resume."""
    name = signal.Signals(result.stopped_by or signal.SIGTERM).name
    stopped = f"Stopped by {name} after step {result.steps:,}"
    if result.checkpoint is None:
        return f"{stopped}; nothing was saved"
    return f"{stopped}; saved to {result.checkpoint}; resume with: {resume_command}"


def _size(size: int) -> str:
    """Bytes as MiB, or as GiB from 1 GiB on."""
    return show_gib(size) if size >= GIB else f"{size / 2**20:,.1f} MiB"
