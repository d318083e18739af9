"""What a script does not do that the trainer does."""

from __future__ import annotations

from shardwise.spec.lookup import ModuleRef
from shardwise.spec.run import RunSpec
from shardwise.stacks.write.python import foreign
from shardwise.stacks.write.python.data import token_folders
from shardwise.stacks.write.python.settings import data_of, on_cpu, train_of


def losses_of(run: RunSpec, written: bool) -> tuple[str, ...]:
    """A sentence for each."""
    train = train_of(run)
    found = [*_model(run, written), *_data(run)]
    if train.device == "auto" and not on_cpu(run):
        found.append('train.device: "auto" is written as CUDA; the script does not fall back.')
    if train.checkpoint.save:
        when = f"every {train.checkpoint.every} steps and" if train.checkpoint.every else "only"
        found.append(
            f"train.checkpoint: the script saves {when} at its end, in the foreground, keeps all, "
            "verifies none, and always starts at step 0."
        )
    if train.restart.attempts:
        found.append(
            "train.restart: nothing starts it again or watches for ranks that hang; torchrun "
            "--max-restarts starts it from step 0."
        )
    if train.profile is not None:
        found.append("train.profile: no step is profiled.")
    if train.measure:
        found.append("train.measure: memory and traffic of a step are not measured.")
    if train.trackers != ():
        found.append("train.trackers: numbers go to metrics.jsonl and the terminal only.")
    found.append("A signal ends the script at once, without a save.")
    return tuple(found)


def _model(run: RunSpec, written: bool) -> list[str]:
    if isinstance(run.model, ModuleRef):
        return []
    if written:
        if train_of(run).meta_init:
            return []
        return ["train.meta_init: the script draws the first weights as if it were true."]
    found = [f"model: needs transformers for the model {run.model.name}."]
    if not foreign.fills(run):
        found.append("model: every process builds all of it before it is sharded.")
    return found


def _data(run: RunSpec) -> list[str]:
    data = data_of(run)
    if data.source is not None:
        return [
            f"data.source: the script stops with an error where {data.source} ends before the "
            "last step."
        ]
    if not data.path:
        return []
    folders = token_folders(data)
    if not folders:
        return [
            "data.path: is not tokenized yet, and the script cannot do it; run shardwise train "
            f"once, and put the folder that it makes in {data.cache} in TOKENS."
        ]
    sure = "" if len(folders) == 1 else f", the newest of {len(folders)} of that name"
    return [f"data.path: the script reads the tokens in {folders[-1].as_posix()}{sure}."]
