"""The screen of `shardwise calibrate` when it measures: progress, then results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from shardwise.report.screen import bullet, option, plain_console, plain_table, screen
from shardwise.spec.quantity import show_seconds
from shardwise.step.words import percent

if TYPE_CHECKING:
    from shardwise.trials.calibrate.machine.measure import Machine
    from shardwise.trials.calibrate.machine.quality import Doubt


class MeasuringScreen:
    """Progress of a measurement on stderr: a live line on a terminal, else a line per kind.

    Stderr keeps the standard output clean for `--json`.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._out = plain_console(stderr=True)
        self._bar: Progress | None = None
        self._last = ""
        self._begin = time.monotonic()
        self.seconds = 0.0

    def __enter__(self) -> MeasuringScreen:
        if self._out.is_terminal and not self._quiet:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                console=self._out,
                transient=True,
            )
            self._task = self._bar.add_task("starting", total=None)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.seconds = time.monotonic() - self._begin
        if self._bar is not None:
            self._bar.stop()

    def step(self, kind: str, which: str = "") -> None:
        """Show that `kind` (and `which` of it) is measured next."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.update(self._task, description=f"Measuring {kind} {which}")
        elif kind != self._last:
            self._out.print(f"Measuring {kind} …")
            self._last = kind


def print_machine(machine: Machine, seconds: float) -> None:
    """Print the measured compute rates, memory rates and collectives of this machine."""
    out = screen()
    through = f", {machine.backend}" if machine.backend else ""
    where = f"{machine.nodes} x {machine.devices_per_node} {machine.device}{through}"
    out.print(Text(where, style="bold") + Text(f", measured in {seconds:.0f} s"))
    out.print()
    out.print(_products(machine))
    compute = machine.compute
    rows = [
        ("attention, causal", f"{compute.attention_rate / 1e9:,.1f} GFLOPS"),
        ("memory, copy", f"{compute.copy_rate / 1e9:,.1f} GB/s"),
        ("memory, element-wise", f"{compute.elementwise_rate / 1e9:,.1f} GB/s"),
        ("optimizer, fused AdamW", f"{compute.optimizer_rate / 1e9:,.1f} GB/s"),
        ("operation overhead", f"{compute.launch_s * 1e6:.1f} µs"),
    ]
    if machine.contention is not None:
        slowdown = f"{machine.contention:.2f} s per s"
        rows.append(("slowdown while overlapped", slowdown))
    if machine.exchange_s is not None:
        rows.append(("tensor-parallel collective", f"{machine.exchange_s * 1e3:.1f} ms"))
    out.print()
    for name, value in rows:
        out.print(f"{name:<30}{value:>16}")
    if machine.collectives:
        out.print()
        out.print(_collectives(machine))
        note = "Gbit/s: linear fit of large messages, 95 % interval. Latency: smallest message."
        out.print(note, style="dim")
    outliers, repetitions = _outliers(machine)
    out.print(f"Outliers left out: {outliers} of {repetitions} repetitions", style="dim")


def print_doubts(doubts: Sequence[Doubt], *, is_written: bool) -> None:
    """Print why the measurement is poor and what to do; nothing without doubts.

    `is_written`: the cluster file is written nevertheless.
    """
    if not doubts:
        return
    out = screen()
    out.print(Text("\nPoor measurement: predictions from it would be wrong.", style="yellow"))
    for doubt in doubts:
        bullet(out, _doubt_words(doubt))
    action = "" if is_written else "Nothing is written. "
    again = "" if is_written else ", or add --force"
    option(out, f"{action}Measure again when the machine is idle{again}.")


def _doubt_words(doubt: Doubt) -> str:
    """Sentence: why the measurement is poor, with the measured value and its limit."""
    if doubt.kind == "load":
        return (
            f"Other processes used {percent(doubt.value)} of the cores before it began (limit "
            f"{percent(doubt.limit)})."
        )
    if doubt.kind == "spread":
        return (
            f"The same work varied by a factor of {doubt.value:.1f} between repetitions, 10th to "
            f"90th percentile (limit {doubt.limit:.1f})."
        )
    return (
        f"A line fits the times of {doubt.where} with R² {doubt.value:.2f} only (at least "
        f"{doubt.limit:.2f})."
    )


def _products(machine: Machine) -> Any:
    """Table of matmul rates in GFLOPS by dtype and edge length of the matrices."""
    table = plain_table()
    table.add_column("matmul", no_wrap=True)
    edges = sorted({one.edge for one in machine.compute.products})
    for edge in edges:
        table.add_column(f"{edge:,}", justify="right", no_wrap=True)
    for dtype in dict.fromkeys(one.dtype for one in machine.compute.products):
        rates = {one.edge: one.rate for one in machine.compute.products if one.dtype == dtype}
        cells = [f"{rates[edge] / 1e9:,.0f}" if edge in rates else "" for edge in edges]
        table.add_row(f"{dtype}, GFLOPS", *cells)
    return table


def _collectives(machine: Machine) -> Any:
    """Table of collectives: latency, bandwidth in Gbit/s with 95 % interval, R² of the fit."""
    table = plain_table()
    for title, side in (("collective", "left"), ("ranks", "right"), ("latency", "right"),
                        ("Gbit/s", "right"), ("", "left"), ("R²", "right")):  # fmt: skip
        table.add_column(title, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for one in machine.collectives:
        low, high = (rate * 8 / 1e9 for rate in one.line.rate_interval)
        table.add_row(
            f"{one.operation.replace('_', '-')} {one.place}",
            str(one.members),
            _latency(one.line.fixed_s),
            f"{one.line.rate * 8 / 1e9:.3g}",
            f"{low:.3g} to {high:.3g}",
            f"{one.line.r_squared:.3f}",
        )
    return table


def _latency(seconds: float) -> str:
    """Seconds as text; below 1 ms as microseconds."""
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else show_seconds(seconds)


def _outliers(machine: Machine) -> tuple[int, int]:
    """Number of repetitions left out as outliers, and number of all repetitions."""
    timings = [one.timing for one in machine.compute.products]
    timings += [m.timing for one in machine.collectives for m in one.messages]
    return sum(t.outliers for t in timings), sum(len(t.seconds) for t in timings)


def machine_table(machine: Machine) -> dict[str, Any]:
    """All measurements as a JSON object: rates in FLOP/s and bytes/s, times in seconds."""
    compute = machine.compute
    return {
        "device": machine.device,
        "backend": machine.backend,
        "nodes": machine.nodes,
        "devices_per_node": machine.devices_per_node,
        "load": machine.load,
        "matmul": [
            {"dtype": p.dtype, "edge": p.edge, "flops_per_s": p.rate, **p.timing.summary()}
            for p in compute.products
        ],
        "attention_flops_per_s": compute.attention_rate,
        "copy_bytes_per_s": compute.copy_rate,
        "elementwise_bytes_per_s": compute.elementwise_rate,
        "launch_s": compute.launch_s,
        "optimizer_bytes_per_s": compute.optimizer_rate,
        **({} if machine.contention is None else {"contention": machine.contention}),
        **({} if machine.exchange_s is None else {"exchange_s": machine.exchange_s}),
        "collectives": [
            {
                "operation": one.operation,
                "place": one.place,
                "members": one.members,
                **one.line._asdict(),
                "messages": [{"bytes": m.size, **m.timing.summary()} for m in one.messages],
            }
            for one in machine.collectives
        ],
    }
