"""Settings of the adapter, the job and `[train]` that another stack changes."""

from __future__ import annotations

from shardwise.spec.adapter import Adapter
from shardwise.spec.run import RunSpec
from shardwise.spec.train import TrainSettings
from shardwise.stacks.outcomes import Difference, value_text
from shardwise.stacks.read.adapters import adapter_for
from shardwise.stacks.read.imported import Imported

# Settings of [train] that change the result; the others concern logs and checkpoints.
_ARITHMETIC = ("steps", "epochs", "seed", "learning_rate", "schedule", "warmup_steps",
               "final_learning_rate", "weight_decay", "beta1", "beta2", "epsilon", "momentum",
               "clip_norm")  # fmt: skip


def settings_differences(run: RunSpec, back: Imported, who: str) -> list[Difference]:
    """Settings of the adapter, job and `[train]` that differ in the stack's file."""
    return [
        *adapter_differences(run, back, who),
        *_of_job(run, back, who),
        *_of_train(run, back, who),
    ]


def adapter_differences(run: RunSpec, back: Imported, who: str) -> list[Difference]:
    """Settings of the adapter that differ in the stack's file; empty without an adapter."""
    ours = run.adapter
    if ours is None:
        return []
    if not back.adapter:
        why = f"{who} cannot freeze these; it trains every parameter"
        return [Difference(why, {"adapter": ours})]
    theirs = adapter_for(back.adapter, run.model)
    differences = []
    for name in Adapter.model_fields:
        # An alpha that is not set is twice the rank, so the scale is compared.
        field = "scale" if name == "alpha" else name
        here, there = getattr(ours, field), getattr(theirs, field)
        if here != there:
            setting = f"adapter.{name}"
            why = f"{who} uses {value_text(there)}"
            differences.append(Difference(why, {setting: here}, {setting: there}))
    if ours.train and ours.rank is not None:
        copies = "peft trains copies of these modules and keeps the frozen ones too"
        differences.append(Difference(copies, {"adapter.train": ours.train}))
    return differences


def _of_job(run: RunSpec, back: Imported, who: str) -> list[Difference]:
    """The sequence length, if it differs in the stack's file."""
    length = back.job.get("seq_len")
    if length is None or length == run.job.seq_len:
        return []
    setting = "job.seq_len"
    return [Difference(f"{who} uses {length}", {setting: run.job.seq_len}, {setting: length})]


def _of_train(run: RunSpec, back: Imported, who: str) -> list[Difference]:
    """Settings of `[train]` that differ in the stack's file."""
    if run.train is None:
        return []
    theirs = TrainSettings.read(back.train)
    unused = unused_settings(run, run.train)
    why = f"{who} has no such setting"
    return [
        Difference(why, {f"train.{name}": getattr(run.train, name)})
        for name in _ARITHMETIC
        if name not in unused and getattr(run.train, name) != getattr(theirs, name)
    ]


def unused_settings(run: RunSpec, train: TrainSettings) -> set[str]:
    """The names of settings without effect in this run."""
    unused = {"final_learning_rate"} if train.schedule == "constant" else set()
    # One of the two decides how long a run is.
    unused |= {"epochs" if train.epochs is None else "steps"}
    if run.job.optimizer != "momentum":
        unused |= {"momentum"}
    if run.job.optimizer in ("sgd", "momentum", "adafactor"):
        unused |= {"beta1", "beta2", "epsilon"}
    return unused
