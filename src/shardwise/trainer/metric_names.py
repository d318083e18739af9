"""The metrics that a run gives to Prometheus: their names, kinds and meanings.

Names follow Prometheus: a prefix, base units, `_total` for counters. The documentation, the
dashboard and the alert rules use these names, so names are added but never changed.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Metric(NamedTuple):
    """A metric; every sample also has the label `run`, the name of the run folder."""

    name: str
    help: str
    kind: Literal["gauge", "counter"] = "gauge"
    # Labels in addition to `run`.
    labels: tuple[str, ...] = ()


INFO = Metric(
    "shardwise_run_info",
    "Always 1; the labels describe the run",
    labels=("model", "strategy", "cluster", "version"),
)
RUNNING = Metric("shardwise_running", "1 while the run trains, 0 once it has ended")
STEP = Metric("shardwise_step", "Completed steps; falls when a restart replays steps")
PLANNED_STEPS = Metric("shardwise_planned_steps", "Steps of the whole run (train.steps)")
LOGGED_STEP = Metric("shardwise_logged_step", "Step of the last log line; the values below are its")
PREDICTED_STEP = Metric(
    "shardwise_predicted_step_seconds", "Predicted time of a step; absent if not predicted"
)
PREDICTED_MEMORY = Metric(
    "shardwise_predicted_memory_bytes", "Predicted peak of tensors on one device"
)
CHECKPOINT_STEP = Metric(
    "shardwise_checkpoint_step", "Step of the last complete checkpoint; absent before the first"
)
SKIPPED = Metric(
    "shardwise_skipped_steps_total",
    "Steps without an update (gradient not finite) since the process started",
    "counter",
)
RECOVERIES = Metric(
    "shardwise_recoveries_total", "Restarts after a failure in the life of the run", "counter"
)
MEMORY = Metric(
    "shardwise_memory_bytes",
    "Memory of rank 0: allocated, peak and reserved on its GPU, or resident and its peak in RAM",
    labels=("kind",),
)

# Metrics that are one value of a log line, by the key of that value.
LOGGED = {
    "loss": Metric("shardwise_loss", "Mean loss since the last log line, over all ranks"),
    "eval_loss": Metric(
        "shardwise_eval_loss", "Mean loss of the last evaluation on held-out data, over all ranks"
    ),
    "eval_perplexity": Metric("shardwise_eval_perplexity", "e to the held-out loss"),
    "eval_s": Metric("shardwise_eval_seconds", "Time of the last evaluation"),
    "gradient_norm": Metric("shardwise_gradient_norm", "Norm of all gradients before clipping"),
    "learning_rate": Metric("shardwise_learning_rate", "Learning rate"),
    "step_s": Metric("shardwise_step_seconds", "Median time of a step since the last log line"),
    "step_s_p10": Metric("shardwise_step_seconds_p10", "10th percentile of the same"),
    "step_s_p90": Metric("shardwise_step_seconds_p90", "90th percentile of the same"),
    "tokens_per_s": Metric("shardwise_tokens_per_second", "Tokens per second, all devices"),
    "tokens_per_s_per_device": Metric(
        "shardwise_tokens_per_second_per_device", "Tokens per second of one device"
    ),
    "mfu": Metric("shardwise_mfu_ratio", "Model FLOPs utilisation, 0 to 1"),
    "expert_load": Metric(
        "shardwise_expert_load_ratio",
        "Tokens of the busiest expert over their mean, in the least even block",
    ),
    "rank_load": Metric(
        "shardwise_expert_rank_load_ratio",
        "The same of the ranks of expert groups, with expert parallelism",
    ),
    "busiest_rank": Metric(
        "shardwise_expert_busiest_rank",
        "Number of the rank with that load in its expert group",
    ),
    "routing_entropy": Metric(
        "shardwise_routing_entropy_ratio",
        "Entropy of tokens over experts in the least even block: 0 one expert, 1 all alike",
    ),
    "profile_compute": Metric("shardwise_profile_compute_ratio", "Share of a step in compute"),
    "profile_exposed": Metric(
        "shardwise_profile_exposed_communication_ratio",
        "Share of a step in communication that nothing hides",
    ),
    "profile_idle": Metric("shardwise_profile_idle_ratio", "Share of a step without work"),
    "profile_overlap": Metric(
        "shardwise_profile_overlap_ratio", "Share of communication hidden behind compute"
    ),
}
# Values of a log line that are one kind of memory each.
MEMORY_KINDS = {
    "memory_current_bytes": "allocated",
    "memory_peak_bytes": "peak",
    "memory_reserved_bytes": "reserved",
    "resident_bytes": "resident",
    "resident_peak_bytes": "resident_peak",
}
METRICS = (
    *(INFO, RUNNING, STEP, PLANNED_STEPS, LOGGED_STEP, *LOGGED.values(), MEMORY, SKIPPED),
    *(RECOVERIES, CHECKPOINT_STEP, PREDICTED_STEP, PREDICTED_MEMORY),
)
