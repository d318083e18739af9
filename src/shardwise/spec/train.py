"""The `[train]` and `[data]` sections: steps, optimizer settings, checkpoints and data."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StrictBool, field_validator, model_validator

from shardwise.spec.quantity import Count
from shardwise.spec.record import Record

Steps = Annotated[Count, Field(ge=0, le=10**12)]
Share = Annotated[float, Field(ge=0, le=1)]

Schedule = Literal["cosine", "constant"]
Tracker = Literal["tensorboard", "wandb", "mlflow"]


class ProfileSettings(Record):
    """The `[train.profile]` section: which steps torch.profiler records, and what stays on disk.

    A moment is a few steps in a row, in one folder of traces.
    """

    # Steps before the first that is profiled. It is later where steps are still measured.
    after: Annotated[Count, Field(ge=1, le=10**12)] = 10
    # Steps of one moment; unset, 3, or 1 where moments repeat.
    steps: Annotated[Count, Field(ge=1, le=1000)] | None = None
    # From one moment to the next; unset, there is one moment.
    every: Annotated[Count, Field(ge=1, le=10**12)] | None = None
    # How many moments stay on disk, the oldest going first; 0 keeps all.
    keep: Annotated[Count, Field(ge=0)] = 5
    # One process is enough to see where time goes; all are needed to see who is late.
    ranks: Literal["all", "first"] = "all"
    # Without shapes the bytes of a collective on a CPU are unknown.
    shapes: StrictBool = True
    memory: StrictBool = False

    @property
    def length(self) -> int:
        return self.steps or (3 if self.every is None else 1)

    @model_validator(mode="after")
    def _apart(self) -> Self:
        # A step warms up before, in the one after traces are written, and one stays undisturbed.
        least = self.length + 3
        if self.every is not None and self.every < least:
            raise ValueError(
                f"every {self.every} leaves no undisturbed step between moments of {self.length}; "
                f"set it to at least {least}"
            )
        return self


class CheckpointSettings(Record):
    """The `[train.checkpoint]` section: when a run is saved, where, and how many saves stay.

    A run is saved after so many minutes or steps, when it is asked to stop, and at its end.
    `checkpoint = false` saves nothing.
    """

    save: StrictBool = True
    # From one to the next, whichever comes first; 0 minutes and no steps mean only at the end.
    minutes: Annotated[float, Field(ge=0)] = 15.0
    every: Annotated[Count, Field(ge=1, le=10**12)] | None = None
    # How many stay, the oldest going first; 0 keeps all.
    keep: Annotated[Count, Field(ge=0)] = 2
    # Training goes on while a copy in the host's memory is written.
    background: StrictBool = True
    # A folder, or the URL of an object store such as s3://bucket/runs, in which the run's name is
    # a folder; unset, the run's own folder.
    to: str | None = None


class RestartSettings(Record):
    """The `[train.restart]` section: when a run that broke starts again, and what counts as broken.

    A rank that stays in one section of its work for long is named, and its stack is written; one
    that stays for longer is killed. Both grow with the longest it has ever needed for a section.
    """

    # So many in a row without a new checkpoint; 0 never starts again.
    attempts: Annotated[Count, Field(ge=0, le=1000)] = 3
    named_after_s: Annotated[float, Field(gt=0)] = 10.0
    killed_after_s: Annotated[float, Field(gt=0)] = 30.0
    # Of what may take long: starting, the first steps, loading, saving.
    slow_after_s: Annotated[float, Field(gt=0)] = 1800.0


class TrainSettings(Record):
    """The `[train]` section. Learning rates follow a warm-up and then the schedule."""

    steps: Annotated[Count, Field(ge=1, le=10**12)] = 100
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"

    learning_rate: Annotated[float, Field(gt=0)] = 3e-4
    schedule: Schedule = "cosine"
    warmup_steps: Steps = 0
    # Where the schedule ends, as a share of the learning rate.
    final_learning_rate: Share = 0.1
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    beta1: Share = 0.9
    beta2: Share = 0.95
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    momentum: Share = 0.9
    # Gradients are scaled down to this global norm; 0 leaves them as they are.
    clip_norm: Annotated[float, Field(ge=0)] = 1.0
    # What happens after a gradient that is not finite; its update is never applied.
    non_finite: Literal["stop", "skip"] = "stop"

    log_every: Annotated[Count, Field(ge=1)] = 10
    # Beside metrics.jsonl; unset, TensorBoard where it is installed.
    trackers: tuple[Tracker, ...] | None = None
    # One step early in the run is counted and weighed; it is slow, and left out of the timings.
    measure: StrictBool = True
    # Steps that are profiled; unset, none.
    profile: ProfileSettings | None = None
    checkpoint: CheckpointSettings = CheckpointSettings()
    restart: RestartSettings = RestartSettings()
    # Where the folder of each run is made, relative to where the command runs.
    folder: str = "runs"
    # Threads of a process on a CPU; unset, the cores are divided among the processes.
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    # Build on the meta device and initialise unit by unit, so that no process holds the whole
    # model.
    meta_init: StrictBool = True

    @field_validator("checkpoint", mode="before")
    @classmethod
    def _on_or_off(cls, value: object) -> object:
        return {"save": value} if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} exceed the {self.steps} steps")
        return self

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        import math

        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        rest = max(1, self.steps - self.warmup_steps)
        share = min(1.0, (step - self.warmup_steps) / rest)
        cosine = 0.5 * (1 + math.cos(math.pi * share))
        final = self.final_learning_rate
        return self.learning_rate * (final + (1 - final) * cosine)


class DataSettings(Record):
    """The `[data]` section: local files, tokenized once, or tokens that are made up.

    - `path`: one or more files or folders of `.txt`, `.jsonl` or `.parquet`, relative to the
      run.toml.
    - `source = "package.module:function"`: called with (rank, world), it returns an iterable of
      micro-batches of token ids, each one sequence longer than what is predicted from.
    - neither: synthetic tokens.
    """

    path: tuple[str, ...] = ()
    source: str | None = None
    # "bytes" needs no file: a token is a byte. Otherwise a tokenizer.json or a folder with one.
    tokenizer: str = "bytes"
    # Where the text is in jsonl and parquet.
    text_key: str = "text"
    # Where tokenized shards are kept, relative to where the command runs.
    cache: str = ".shardwise-cache"
    shuffle: StrictBool = True

    @field_validator("path", mode="before")
    @classmethod
    def _one_or_more(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.path and self.source:
            raise ValueError("path and source exclude each other; give one of the two")
        return self

    @property
    def synthetic(self) -> bool:
        return not self.path and self.source is None
