"""What of an adapter, of a job and of `[train]` another stack does not do as a run says."""

from __future__ import annotations

from shardwise.spec.adapter import Adapter
from shardwise.spec.run import RunSpec
from shardwise.spec.train import TrainSettings
from shardwise.stacks.read.imported import Imported

# Settings that change what is computed; the others are about how a run is watched and saved.
_ARITHMETIC = ("steps", "seed", "learning_rate", "schedule", "warmup_steps", "final_learning_rate",
               "weight_decay", "beta1", "beta2", "epsilon", "momentum", "clip_norm")  # fmt: skip


def settings_differences(run: RunSpec, back: Imported, who: str) -> list[str]:
    """One sentence for each setting that is not read back from the stack's file."""
    return [
        *adapter_differences(run.adapter, back, who),
        *_of_job(run, back, who),
        *_of_train(run, back, who),
    ]


def adapter_differences(ours: Adapter | None, back: Imported, who: str) -> list[str]:
    """One sentence for each setting of the adapter that is not read back from the stack's file."""
    if ours is None:
        return []
    if not back.adapter:
        return [f"adapter = {ours}: {who} cannot freeze these; it trains every parameter."]
    theirs = Adapter.read(back.adapter)
    said = []
    for name in Adapter.model_fields:
        # Unset is twice the rank.
        field = "scale" if name == "alpha" else name
        here, there = getattr(ours, field), getattr(theirs, field)
        if here != there:
            said.append(f"adapter.{name} = {_shown(here)}: {who} uses {_shown(there)}.")
    if ours.train and ours.rank is not None:
        said.append(
            f"adapter.train = {_shown(ours.train)}: peft trains copies of these modules and keeps "
            "the frozen ones too."
        )
    return said


def _of_job(run: RunSpec, back: Imported, who: str) -> list[str]:
    length = back.job.get("seq_len")
    if length is None or length == run.job.seq_len:
        return []
    return [f"job.seq_len = {run.job.seq_len}: {who} uses {length}."]


def _of_train(run: RunSpec, back: Imported, who: str) -> list[str]:
    if run.train is None:
        return []
    theirs = TrainSettings.read(back.train)
    unused = _unused(run, run.train)
    return [
        f"train.{name} = {_shown(getattr(run.train, name))}: {who} has no such setting."
        for name in _ARITHMETIC
        if name not in unused and getattr(run.train, name) != getattr(theirs, name)
    ]


def _unused(run: RunSpec, train: TrainSettings) -> set[str]:
    """Settings without effect in this run."""
    unused = {"final_learning_rate"} if train.schedule == "constant" else set()
    if run.job.optimizer != "momentum":
        unused |= {"momentum"}
    if run.job.optimizer in ("sgd", "momentum", "adafactor"):
        unused |= {"beta1", "beta2", "epsilon"}
    return unused


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
