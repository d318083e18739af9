"""The `[train]` and `[data]` sections: steps, optimizer settings, checkpoints and data."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StrictBool, field_validator, model_validator

from shardwise.spec.code_name import CodeName
from shardwise.spec.quantity import Count
from shardwise.spec.record import Record

Steps = Annotated[Count, Field(ge=0, le=10**12)]
Share = Annotated[float, Field(ge=0, le=1)]

Schedule = Literal["cosine", "linear", "constant"]
BalanceLoss = Literal["none", "local", "global"]
Tracker = Literal["tensorboard", "wandb", "mlflow"]


class ProfileSettings(Record):
    """The `[train.profile]` section: which steps torch.profiler records, and what stays on disk.

    A window is a few consecutive steps, with one folder of traces.
    """

    # Steps before the first profiled one; more if train.measure needs them.
    after: Annotated[Count, Field(ge=1, le=10**12)] = 10
    # Steps per window. Default: 3, or 1 with `every`.
    steps: Annotated[Count, Field(ge=1, le=1000)] | None = None
    # Steps from one window to the next. Default: one window only.
    every: Annotated[Count, Field(ge=1, le=10**12)] | None = None
    # Windows kept on disk; older ones are deleted. 0 keeps all.
    keep: Annotated[Count, Field(ge=0)] = 5
    # "first" shows where time goes; "all" is needed to find stragglers.
    ranks: Literal["all", "first"] = "all"
    # Record shapes; without them the bytes of collectives on CPUs are unknown.
    shapes: StrictBool = True
    # Record allocations.
    memory: StrictBool = False

    @property
    def length(self) -> int:
        """Steps per window, with the default filled in."""
        return self.steps or (3 if self.every is None else 1)

    @model_validator(mode="after")
    def _check_every(self) -> Self:
        # One warm-up step before a window, one that writes traces after it, and one normal step.
        least = self.length + 3
        if self.every is not None and self.every < least:
            raise ValueError(
                f"every {self.every} leaves no normal step between windows of {self.length} steps; "
                f"set it to at least {least}"
            )
        return self


class CheckpointSettings(Record):
    """The `[train.checkpoint]` section: when and where a run is saved, and how many saves are kept.

    A run is saved every so many minutes or steps, when it is stopped, and at its end. Without
    `every` it is first saved after 10 seconds, then at intervals that double up to `minutes`.
    `checkpoint = false` saves nothing.
    """

    save: StrictBool = True
    # Minutes and steps between saves, whichever comes first; 0 minutes without `every`: only at the
    # end.
    minutes: Annotated[float, Field(ge=0)] = 15.0
    every: Annotated[Count, Field(ge=1, le=10**12)] | None = None
    # Checkpoints kept; older ones are deleted. 0 keeps all.
    keep: Annotated[Count, Field(ge=0)] = 2
    # Write a copy in host memory while training continues.
    background: StrictBool = True
    # A folder or object store, such as s3://bucket/runs; the run's name is appended. Default: the
    # run's own folder.
    to: str | None = None


class RestartSettings(Record):
    """The `[train.restart]` section: restarts after failures, and time limits that detect hangs.

    A rank that stays in one section of a step for `named_after_s` is reported with its stack; after
    `killed_after_s` it is killed. Both limits grow with the longest duration of that section.
    `lost_after_s`, `join_s` and `last_call_s` are for several hosts, those after them for
    `engine = "torchft"`.
    """

    # What a failure restarts: all processes, or only the replica group that failed, while torchft
    # lets the others train on.
    engine: Literal["launcher", "torchft"] = "launcher"
    # Restarts in a row without a new checkpoint; 0 never restarts.
    attempts: Annotated[Count, Field(ge=0, le=1000)] = 3
    named_after_s: Annotated[float, Field(gt=0)] = 10.0
    killed_after_s: Annotated[float, Field(gt=0)] = 30.0
    # The limit of slow sections: start, first steps, loading, saving.
    slow_after_s: Annotated[float, Field(gt=0)] = 1800.0
    # A host or connection that is silent for so long is lost.
    lost_after_s: Annotated[float, Field(ge=1)] = 10.0
    # Longest wait for the rendezvous server and for enough hosts.
    join_s: Annotated[float, Field(gt=0)] = 600.0
    # Wait for more hosts after the last one that joined, if the number may vary.
    last_call_s: Annotated[float, Field(ge=0)] = 10.0
    # Address and port of the torchft lighthouse, such as 10.0.0.9:29510.
    lighthouse: Annotated[str, Field(pattern=r"^\[?[\w.:-]+\]?:\d{1,5}$")] | None = None
    # Least number of replica groups with which steps continue.
    min_replicas: Annotated[Count, Field(ge=1, le=10**5)] = 1
    # A replica group that does not answer for so long is left out; more than the slowest step.
    replica_timeout_s: Annotated[float, Field(ge=1)] = 60.0
    # Batches of absent groups: "dropped" skips them, "given" lets the other groups train them.
    absent_batches: Literal["dropped", "given"] = "dropped"

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        if self.engine == "torchft" and self.lighthouse is None:
            raise ValueError(
                'engine "torchft" needs a lighthouse; set lighthouse = "HOST:29510" to where '
                "torchft_lighthouse runs"
            )
        if self.engine != "torchft":
            for name in ("lighthouse", "min_replicas", "replica_timeout_s", "absent_batches"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f'{name} means nothing without engine = "torchft"')
        return self


# The environment variable with the secret that hosts of a run authenticate with.
SECRET_VARIABLE = "SHARDWISE_RDZV_SECRET"


class MetricsSettings(Record):
    """The `[train.metrics]` section: metrics for Prometheus, given by rank 0.

    Without this section nothing is served or written. No port opens unless `port` is set.
    """

    # Port of the endpoint http://ADDRESS:PORT/metrics. Default: none opens.
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    # Where the endpoint listens: this machine only, or "0.0.0.0" for a Prometheus elsewhere.
    address: str = "127.0.0.1"
    # The folder of node_exporter's textfile collector; the run writes shardwise-NAME.prom there.
    textfile: str | None = None
    # Seconds between two writes of the textfile.
    textfile_every_s: Annotated[float, Field(ge=0.1)] = 15.0

    @model_validator(mode="after")
    def _check_output(self) -> Self:
        if self.port is None and self.textfile is None:
            raise ValueError("gives metrics to nobody; set port, textfile, or both")
        return self


class TrainSettings(Record):
    """The `[train]` section. The learning rate warms up linearly, then follows the schedule."""

    steps: Annotated[Count, Field(ge=1, le=10**12)] = 100
    # Passes over the data, for stacks that count them instead of steps. Shardwise's trainer does
    # not.
    epochs: Annotated[float, Field(gt=0, le=10**6)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"

    learning_rate: Annotated[float, Field(gt=0)] = 3e-4
    schedule: Schedule = "cosine"
    warmup_steps: Steps = 0
    # The last learning rate, as a share of `learning_rate`.
    final_learning_rate: Share = 0.1
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    beta1: Share = 0.9
    beta2: Share = 0.95
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    momentum: Share = 0.9
    # Clip gradients to this global norm; 0 disables clipping.
    clip_norm: Annotated[float, Field(ge=0)] = 1.0
    # Add the auxiliary loss of a mixture's routers, with the shares of tokens of each rank or all
    # ranks. Its coefficient is the model's.
    balance_loss: BalanceLoss = "none"
    # After a non-finite gradient, whose update is never applied: stop the run or skip the step.
    non_finite: Literal["stop", "skip"] = "stop"

    log_every: Annotated[Count, Field(ge=1)] = 10
    # In addition to metrics.jsonl. Default: TensorBoard if installed.
    trackers: tuple[Tracker, ...] | None = None
    # Metrics for Prometheus. Default: none.
    metrics: MetricsSettings | None = None
    # Measure collectives and memory in two early steps, which are slower and not timed.
    measure: StrictBool = True
    # Steps recorded by torch.profiler. Default: none.
    profile: ProfileSettings | None = None
    checkpoint: CheckpointSettings = CheckpointSettings()
    restart: RestartSettings = RestartSettings()
    # Parent of the run folders, relative to the working directory.
    folder: str = "runs"
    # CPU threads per process. Default: the cores divided by the processes.
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    # Build on the meta device and initialise unit by unit, so that no process holds the full
    # model.
    meta_init: StrictBool = True

    @field_validator("checkpoint", mode="before")
    @classmethod
    def _bool_to_settings(cls, value: object) -> object:
        return {"save": value} if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} is more than steps {self.steps}")
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
        left = 1 - share if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * share))
        final = self.final_learning_rate
        return self.learning_rate * (final + (1 - final) * left)


class DataSettings(Record):
    """The `[data]` section: local files, your own iterable, or synthetic tokens.

    - `path`: one or more files or folders of `.txt`, `.jsonl` or `.parquet`, relative to the
      run.toml. A `.jsonl` holds text, or chat and instruction examples.
    - `source = "package.module:function"`: called with (rank, world); returns an iterable of
      micro-batches, tensors of token ids of shape (micro_batch, seq_len + 1).
    - neither: synthetic tokens.
    """

    path: tuple[str, ...] = ()
    source: CodeName | None = None
    # "bytes" (one token per byte), a tokenizer.json, or a folder with one.
    tokenizer: str = "bytes"
    # The key or column with the text in jsonl and parquet.
    text_key: str = "text"
    # "chat": examples with messages, or with a prompt and a completion. "auto": chat where the
    # first record of a jsonl has those and no text.
    format: Literal["auto", "text", "chat"] = "auto"
    # Tokens of chat examples that count for the loss: those of the assistant, or all.
    loss_on: Literal["answers", "all"] = "answers"
    # Put several chat examples into one sequence; no example attends to another. Without it, each
    # is padded to seq_len.
    packing: StrictBool = True
    # The folder for tokenized shards, relative to the working directory.
    cache: str = ".shardwise-cache"
    shuffle: StrictBool = True

    @field_validator("path", mode="before")
    @classmethod
    def _to_tuple(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.path and self.source:
            raise ValueError("path and source exclude each other; give one of the two")
        return self

    @property
    def synthetic(self) -> bool:
        return not self.path and self.source is None
