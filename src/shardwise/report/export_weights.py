"""The screen of `shardwise export-weights`."""

from __future__ import annotations

from shardwise.checkpoint.export.weights import ExportedWeights
from shardwise.report.screen import plain_console
from shardwise.spec.quantity import show_gb


def print_exported(exported: ExportedWeights) -> None:
    """Print what was exported, where, and how to load it."""
    out = plain_console()
    # Not wrapped, so that names can be copied.
    for reason in exported.skipped:
        out.print(f"Skipped corrupt checkpoint {reason}", style="yellow", soft_wrap=True)
    for line in _lines(exported):
        out.print(line, soft_wrap=True)


def _lines(exported: ExportedWeights) -> list[str]:
    """Lines on the exported step, files and dtypes, and how to load them."""
    files = exported.files
    named = files[0] if len(files) == 1 else f"{len(files):,} files, {files[0]} to {files[-1]}"
    lines = [
        f"Exported step {exported.step:,}: {exported.tensors:,} tensors, "
        f"{show_gb(exported.bytes)}, {' and '.join(exported.dtypes)}, in {named}",
    ]
    if exported.base:
        lines.append(exported.base)
    if exported.adapter:
        lines.append(f"Written to {exported.folder}")
        lines.append(f"Load with: PeftModel.from_pretrained(base_model, {exported.folder!r})")
    elif exported.no_config:
        lines.append(f"Written to {exported.folder}, without config.json: {exported.no_config}")
    else:
        lines.append(f"Written to {exported.folder}")
        lines.append(f"Load with: AutoModelForCausalLM.from_pretrained({exported.folder!r})")
    return lines
