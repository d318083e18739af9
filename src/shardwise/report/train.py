"""What a person sees of a run: a headline, a bar or plain lines, and the comparison at its end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from shardwise.report.compare import comparison_table
from shardwise.report.screen import screen
from shardwise.report.strategy import run_words
from shardwise.spec.quantity import GIB, show_count, show_gib, show_seconds
from shardwise.spec.run import RunSpec
from shardwise.step import StepProfile

if TYPE_CHECKING:
    from shardwise.checkpoint.dcp.load import Loaded
    from shardwise.train.run import Result

_REASONS = {
    "done": "Done",
    "stopped": "Stopped when asked",
    "data ended": "The data ended",
}


class TrainScreen:
    """A bar on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self._out = screen()
        self._bar: Progress | None = None
        self._total = 0

    def started(
        self, run: RunSpec, predicted: StepProfile, folder: Path, loaded: Loaded | None
    ) -> None:
        out = self._out
        assert run.train is not None
        self._total = run.train.steps
        for reason in loaded.passed_over if loaded else []:
            # Names that are cut in two cannot be looked for.
            out.print(f"Passed over {reason}", style="yellow", soft_wrap=True)
        if loaded is not None:
            out.print(
                f"Goes on from step {loaded.manifest.step:,}, saved in {folder}", soft_wrap=True
            )
        devices = run.cluster.devices
        kind = "CPU process" if run.cluster.device.is_cpu else run.cluster.device.name
        out.print(
            Text(f"{predicted.model['name']}", style="bold")
            + Text(f" ({show_count(predicted.model['parameters'])} parameters)")
            + Text(
                f" on {devices} {kind}{'es' if run.cluster.device.is_cpu and devices > 1 else ''}"
            )
        )
        out.print(run_words(run), style="dim")
        memory = predicted.known_memory
        assert memory.capacity_bytes is not None
        out.print(
            f"Predicted peak {_size(memory.peak_allocated_bytes)} of "
            f"{show_gib(memory.capacity_bytes)} each. Writing to {folder}"
        )
        out.print()
        if out.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=18),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(compact=True),
                console=out,
                transient=True,
            )
            done = loaded.manifest.step if loaded else 0
            self._task = self._bar.add_task("", total=self._total, completed=done, numbers="")
            self._bar.start()

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        rate = values.get("tokens_per_s")
        speed = f"{rate:,.0f} tokens/s" if rate else ""
        if self._bar is not None:
            numbers = f"loss {values['loss']:.4f}  {speed}"
            self._bar.update(self._task, completed=step + 1, numbers=numbers)
            return
        skipped = f"  {values['skipped']:.0f} updates skipped" if values["skipped"] else ""
        time = f"  {show_seconds(values['step_s'])} a step" if "step_s" in values else ""
        self._out.print(
            f"step {step + 1:>{len(str(self._total))}}/{self._total}  loss {values['loss']:.4f}  "
            f"norm {values['gradient_norm']:.3f}  {speed}{time}{skipped}"
        )

    def ended(self, result: Result) -> None:
        self.close()
        out = self._out
        ending = f"{_REASONS[result.reason]} after {result.steps:,} steps"
        loss = result.last.get("loss")
        out.print(Text(ending, style="bold") + Text(f", loss {loss:.4f}." if loss else "."))
        if result.measured is not None:
            out.print()
            out.print(comparison_table(result.predicted, result.measured))
            if result.measured.memory is None:
                out.print("\nMemory of compiled code can be weighed on a GPU only.")

    def close(self) -> None:
        """Take the bar away; also when a run breaks off."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _size(size: int) -> str:
    return show_gib(size) if size >= GIB else f"{size / 2**20:,.1f} MiB"
