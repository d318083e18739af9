"""Settings that an exported script does not support, and what it does instead."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.spec.chat import holds_chat
from shardwise.spec.lookup import ModuleRef
from shardwise.spec.run import RunSpec
from shardwise.spec.train import TrainSettings
from shardwise.stacks.write.chat_differences import stream_differences
from shardwise.stacks.write.python.data import token_folders
from shardwise.stacks.write.python.model import builder_of, fills
from shardwise.stacks.write.python.settings import data_of, on_cpu, train_of


def unsupported_by_script(run: RunSpec) -> tuple[str, ...]:
    """One sentence for each setting of the run that the script does not support."""
    return (*unsupported_by_step(run), *_of_loop(run))


def unsupported_by_step(run: RunSpec) -> tuple[str, ...]:
    """One sentence for each unsupported setting of the model, data, step and measurement.

    They hold for every training loop around the step.
    """
    train = train_of(run)
    found = [*_model(run), *_data(run)]
    if run.strategy.split_root:
        found.append("split_root = true: embedding and head are gathered with the root, all step.")
    if run.strategy.expert > 1:
        found.append(
            f"expert = {run.strategy.expert}: the script divides no experts, every device gathers "
            "all of a layer."
        )
    if run.strategy.states is not None:
        found.append("states = bf16+stochastic: updates are rounded to nearest.")
    if run.strategy.offloads("optimizer"):
        found.append("offload = optimizer: its states and master weights stay on the device.")
    if run.strategy.offloads("activations"):
        found.append("offload = activations: they stay on the device.")
    if run.strategy.context > 1 and run.strategy.context_method == "ring":
        found.append("context_method = ring: the script exchanges heads for tokens (Ulysses).")
    if run.strategy.attention not in (None, "sdpa"):
        found.append(f"attention = {run.strategy.attention}: the script uses sdpa.")
    if run.strategy.loss == "fused":
        found.append("loss = fused: the script computes head and loss in chunks.")
    found += _compression(run)
    if train.device == "auto" and not on_cpu(run):
        found.append('train.device = "auto": the script uses CUDA and does not fall back to CPUs.')
    if train.profile is not None:
        found.append("train.profile: no step is profiled.")
    return (*found, *_of_training(train))


def _compression(run: RunSpec) -> Iterator[str]:
    """A sentence if gradients are compressed in another way; none without compression."""
    if loses_compression(run):
        yield (
            f"compress = {run.strategy.compress}: on CPUs gradients are averaged as they are; "
            "torch's hook needs NCCL."
        )
    elif run.strategy.compress == "powersgd":
        yield (
            "compress = powersgd: DDP forms buckets in the order in which gradients arrive, so "
            "the random numbers that PowerSGD begins with differ."
        )


def loses_compression(run: RunSpec) -> bool:
    """Whether a script leaves gradients uncompressed: with Gloo, torch has a hook for fp16 only."""
    return on_cpu(run) and run.strategy.compress in ("bf16", "powersgd")


def _of_training(train: TrainSettings) -> list[str]:
    """Sentences about the auxiliary loss, profiling, measurement and metrics."""
    found = []
    if train.balance_loss != "none":
        found.append(
            f"train.balance_loss = {train.balance_loss}: the script adds no auxiliary loss for "
            "routers."
        )
    if train.measure:
        found.append("train.measure: memory and traffic of a step are not measured.")
    if train.metrics is not None:
        found.append("train.metrics: nothing is given to Prometheus.")
    return found


def _of_loop(run: RunSpec) -> Iterator[str]:
    """Sentences about the plain torch loop: checkpoints, restarts and logs."""
    train = train_of(run)
    if train.checkpoint.save:
        when = f"every {train.checkpoint.every} steps and" if train.checkpoint.every else "only"
        yield (
            f"train.checkpoint: the script saves {when} at the end, in the foreground, without "
            "checksums, deletes nothing, and always starts at step 0."
        )
    if train.restart.attempts:
        yield (
            "train.restart: hanging ranks are not detected and failures not restarted; torchrun "
            "--max-restarts restarts from step 0."
        )
    if train.trackers != ():
        yield "train.trackers: metrics go to metrics.jsonl and the terminal only."
    yield "A signal ends the script at once, without saving."


def _model(run: RunSpec) -> list[str]:
    """Sentences about how the model is built and initialised."""
    if isinstance(run.model, ModuleRef):
        return []
    if builder_of(run) == "written":
        if train_of(run).meta_init:
            return []
        return ["train.meta_init = false: the script initialises weights as if it were true."]
    found = [f"model: the script needs transformers to build {run.model.name}."]
    if not fills(run):
        found.append("model: every process builds the whole model before sharding it.")
    return found


def _data(run: RunSpec) -> list[str]:
    """Sentences about the data."""
    data = data_of(run)
    if data.source is not None:
        return [
            f"data.source: the script stops with an error if {data.source} ends before the last "
            "step."
        ]
    if not data.path:
        return []
    if holds_chat(data):
        return [
            *(one.words for one in stream_differences(run, "the script")),
            "data.path: tokenize the examples as text and set TOKENS to the folder.",
        ]
    folders = token_folders(data)
    if not folders:
        return [
            "data.path: the files are not tokenized yet and the script cannot do it; run "
            f"shardwise train once and set TOKENS to the folder it writes in {data.cache}."
        ]
    newest = "" if len(folders) == 1 else f", the newest of {len(folders)} of that name"
    return [f"data.path: the script reads the tokens in {folders[-1].as_posix()}{newest}."]
