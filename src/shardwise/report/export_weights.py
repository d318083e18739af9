"""The screen of `shardwise export-weights`: what was written, and where."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import DownloadColumn, Progress, SpinnerColumn, TransferSpeedColumn

from shardwise.checkpoint.export.weights import Exported
from shardwise.spec.quantity import show_gb


class ExportScreen:
    """Bytes as they are written, on a terminal; then a few lines."""

    def __init__(self, quiet: bool = False) -> None:
        out = Console(stderr=True)
        columns = (SpinnerColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bar = Progress(
            *columns, console=out, transient=True, disable=quiet or not out.is_terminal
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> ExportScreen:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def progress(self, count: int) -> None:
        self._bar.advance(self._task, count)

    def show(self, exported: Exported, console: Console | None = None) -> None:
        out = console or Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
        # Names that are cut in two cannot be copied.
        for why in exported.passed_over:
            out.print(f"Passed over {why}.", style="yellow", soft_wrap=True)
        for line in _lines(exported):
            out.print(line, soft_wrap=True)


def _lines(exported: Exported) -> list[str]:
    files = exported.files
    named = files[0] if len(files) == 1 else f"{len(files):,} files, {files[0]} to {files[-1]}"
    lines = [
        f"Step {exported.step:,}: {exported.tensors:,} tensors, {show_gb(exported.bytes)} of "
        f"{' and '.join(exported.dtypes)}, in {named}.",
    ]
    if exported.no_config:
        lines.append(f"Written to {exported.folder}, without config.json: {exported.no_config}.")
    else:
        lines.append(f"Written to {exported.folder}; transformers loads it by from_pretrained.")
    return lines
