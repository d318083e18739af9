"""The screen of `shardwise export-weights`: what was written, and where."""

from __future__ import annotations

from shardwise.checkpoint.export.weights import ExportedWeights
from shardwise.report.screen import plain_console
from shardwise.spec.quantity import show_gb


def print_exported(exported: ExportedWeights) -> None:
    out = plain_console()
    # Names that are cut in two cannot be copied.
    for why in exported.skipped:
        out.print(f"Passed over {why}.", style="yellow", soft_wrap=True)
    for line in _lines(exported):
        out.print(line, soft_wrap=True)


def _lines(exported: ExportedWeights) -> list[str]:
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
