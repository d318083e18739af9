"""Checks of a run that need no processes: memory, batch, data."""

from __future__ import annotations

from pathlib import Path

from shardwise.planning.api import changes_to_fit_run
from shardwise.predict.api import estimate_run
from shardwise.spec.fused_loss import PACKAGES, check_fused_loss
from shardwise.spec.model import ModelSpec
from shardwise.spec.quantity import show_gib
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.spec.train import DataSettings, TrainSettings
from shardwise.trainer.admit import check_batch, device_kind
from shardwise.trainer.data.chat import is_chat
from shardwise.trainer.data.packing import Sequences
from shardwise.trainer.data.tokenize import find_files, load_tokenizer, read_texts
from shardwise.trials.doctor.check import Check


def check_plan(run: RunSpec) -> list[Check]:
    """Check memory on the run's cluster, batch and data; needs no processes."""
    checks = [_memory(run), _batch(run), _data(run)]
    return checks if run.strategy.loss != "fused" else [*checks, _fused_loss(run)]


def _memory(run: RunSpec) -> Check:
    """Check that the run is predicted to fit on its cluster."""
    name = "memory headroom"
    try:
        resolved = run.resolved()
        memory = estimate_run(resolved).known_memory
    except SpecError as error:
        return Check(name, False, str(error))
    assert memory.needed_bytes is not None
    assert memory.usable_bytes is not None
    needed, usable = show_gib(memory.needed_bytes), show_gib(memory.usable_bytes)
    detail = f"needs {needed}, {usable} usable on {run.cluster}, predicted"
    if memory.verdict == "fits":
        return Check(name, True, detail)
    ways = changes_to_fit_run(resolved)
    change = f"; try {ways[0].options}" if ways else ""
    return Check(name, memory.verdict == "at risk", f"{memory.verdict}: {detail}{change}")


def _batch(run: RunSpec) -> Check:
    """Check that the global batch divides among the devices."""
    name = "batch divides"
    try:
        strategy = run.strategy.resolve(run.cluster.devices, run.cluster.devices_per_node)
        check_batch(run._replace(strategy=strategy))
        split = run.job.split(strategy)
    except SpecError as error:
        return Check(name, False, str(error))
    tokens = run.job.tokens_per_step(split)
    steps = f", {split.accumulate} accumulation steps" if split.accumulate > 1 else ""
    return Check(name, True, f"{tokens:,} tokens per step on {run.cluster.devices} devices{steps}")


def _fused_loss(run: RunSpec) -> Check:
    """Check that the package of the fused loss is installed, and that the run trains on GPUs."""
    name, kernel = "fused loss", run.strategy.loss_kernel
    try:
        check_fused_loss(run.strategy, device_kind(run, run.train or TrainSettings()))
    except SpecError as error:
        return Check(name, False, str(error))
    detail = f"{PACKAGES[kernel][0]} is installed; the checks below run a chunked loss on CPUs"
    return Check(name, True, detail)


def _data(run: RunSpec) -> Check:
    """Check that the data can be read; not run for a data.source."""
    name, data = "data readable", run.data or DataSettings()
    if data.source is not None:
        return Check(name, None, f"{data.source} is checked below")
    if data.synthetic:
        return Check(name, True, "synthetic tokens")
    try:
        files = find_files(data.path)
        return _chat(name, data, run) if is_chat(data, files) else _text(name, data, run, files)
    except SpecError as error:
        return Check(name, False, str(error))


def _text(name: str, data: DataSettings, run: RunSpec, files: list[Path]) -> Check:
    """Check that the first files contain text, and that the vocabulary fits the model."""
    tokenizer = load_tokenizer(data)
    texts = [next(read_texts(file, data.text_key), "") for file in files[:16]]
    tokens = tokenizer.encode(texts)
    if not any(len(part) for part in tokens):
        return Check(name, False, f"data.path: {files[0]} contains no text")
    if isinstance(run.model, ModelSpec) and tokenizer.vocab > run.model.vocab:
        return _vocab_too_large(name, tokenizer.vocab, run.model)
    count = f"{len(files)} file{'s' if len(files) != 1 else ''}"
    return Check(name, True, f"{count}, vocabulary of {tokenizer.vocab:,} tokens")


def _chat(name: str, data: DataSettings, run: RunSpec) -> Check:
    """Check chat examples, by packing them into the cache that the run will use."""
    sequences = Sequences(data, run.job.seq_len)
    if isinstance(run.model, ModelSpec) and sequences.vocab > run.model.vocab:
        return _vocab_too_large(name, sequences.vocab, run.model)
    found = sequences.statistics
    return Check(
        name,
        True,
        f"{found.examples:,} chat examples, median {found.median:,} tokens, longest "
        f"{found.longest:,}; {found.loss_tokens:,} of {found.tokens:,} tokens count for the loss; "
        f"{found.sequences:,} sequences {found.filled:.0%} full; {found.cut:,} examples cut, "
        f"{found.dropped:,} dropped",
    )


def _vocab_too_large(name: str, vocab: int, model: ModelSpec) -> Check:
    return Check(
        name,
        False,
        f"data.tokenizer: has {vocab:,} tokens but the model has {model.vocab:,}; set "
        f"model.vocab = {vocab}",
    )
