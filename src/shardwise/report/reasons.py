"""The reasons of a plan in words: one sentence or two for each kind of reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise.planning.choice import WANTED_HEADROOM
from shardwise.planning.layout import Layout
from shardwise.planning.plan import Plan
from shardwise.planning.reasons import (
    Alternative,
    BatchCapped,
    BeyondPositions,
    ChunkedLoss,
    Compared,
    CompileGain,
    DataParallelEnds,
    DecimalLength,
    Divided,
    DoesNotFit,
    FewerDevices,
    Fragile,
    GradientsUnsharded,
    LargeBatch,
    LeastMemory,
    LimitedBy,
    LinkCrossover,
    LongestSequence,
    LowPrecisionReduce,
    MicroBatchGain,
    NetworkCrossover,
    NoPeerToPeer,
    NoRecompute,
    OnlyReplicated,
    OtherParallelism,
    Padding,
    Reason,
    Recomputes,
    RiskyAlternative,
    RootSplit,
    ShorterFits,
    SingleDevice,
    Slack,
    StackLeavesOut,
    StatesFit,
    StepBatch,
    UnfittedDevice,
    UnfittedExperts,
    UnquantizedExperts,
)
from shardwise.predict.rates import comparison_error
from shardwise.report.estimate_words import unfitted_words
from shardwise.spec.quantity import show_count, write_byte_rate, write_rate
from shardwise.spec.strategy import Strategy, show_recompute
from shardwise.spec.strategy_words import (
    KIND_NAMES,
    configuration_words,
    layout_words,
    mesh_words,
    unusual_settings,
)
from shardwise.step.memory_words import AT_RISK, shortfall_words, show_memory
from shardwise.step.words import (
    VERDICTS,
    capital,
    comparison_words,
    parallelism_words,
    percent,
    signed_percent,
)


def plan_reasons(plan: Plan) -> list[str]:
    """Why this layout, what limits it, and what is left."""
    return [reason_words(reason, plan.units.blocks) for reason in (*plan.why, *plan.limits_why)]


# Savings of memory below this are not worth a word.
MIN_SAVED_BYTES = 2**30 // 10
# Of a speed just beyond the error of comparison.
_MOST_DIGITS = 3
# Smaller shares of a step are not told.
SEEN_SHARE = 0.01
# A network that could be this many times slower does not matter; nobody has one that is slower.
MOST_SLACK = 10


def plan_tips(plan: Plan) -> list[str]:
    """What would bring more, and why it was not chosen."""
    return [reason_words(tip, plan.units.blocks) for tip in plan.tips]


def reason_words(reason: Reason, blocks: int | None = None) -> str:
    """One reason in words. `blocks` is the model's number of blocks, where it is known."""
    return _WORDS[type(reason)](reason, blocks)


def share_words(share: float) -> str:
    """A share without its sign: whole percent, one decimal below 1 %."""
    size = abs(share)
    return percent(size) if size >= 0.0095 else percent(size, 1)


def speed_words(throughput: float) -> str:
    """A relative throughput: "12% slower", "3% faster", "as fast"."""
    if abs(throughput) < 0.0005:
        return "as fast"
    if throughput < -0.5:
        return f"{1 / (1 + throughput):,.1f}x slower"
    size, error, digits = abs(throughput), comparison_error(), 0
    # What is beyond the error of comparison must not read as if it were within.
    while round(size, 2 + digits) <= error < size and digits < _MOST_DIGITS:
        digits += 1
    shown = percent(size, digits) if digits else share_words(size)
    return f"{shown} {'slower' if throughput < 0 else 'faster'}"


def relative_words(throughput: float, too_close: bool) -> str:
    """The speed of one configuration against another: a figure only where it can be told."""
    return "too close to call" if too_close else speed_words(throughput)


def compared_words(throughput: float) -> str:
    """The same, by the error of comparison."""
    return relative_words(throughput, abs(throughput) <= comparison_error())


# ---- the layout -----------------------------------------------------------------------------


def _single(reason: SingleDevice, blocks: int | None) -> str:
    return "One device: there is nothing to shard."


def _states_fit(reason: StatesFit, blocks: int | None) -> str:
    return (
        f"No sharding needed: model states ({show_memory(reason.state_bytes)} of parameters, "
        "gradients and optimizer states) fit on every device."
    )


def _does_not_fit(reason: DoesNotFit, blocks: int | None) -> str:
    why = {
        "ddp": "model states must be sharded",
        "zero2": "it keeps all parameters gathered",
        "zero1": "it keeps all parameters and gradients",
    }.get(reason.strategy.kind)
    told = not_fitting_words(reason)
    if reason.verdict == "at risk":
        return f"{told}. {AT_RISK}"
    return f"{told}; {why}." if why else f"{told}."


def not_fitting_words(reason: DoesNotFit) -> str:
    """A layout with its verdict and by how much it needs more than is usable, without an end."""
    judged = VERDICTS[reason.verdict].words
    short = shortfall_words(reason.needed_bytes, reason.usable_bytes)
    return f"{layout_words(reason.strategy)} {judged}: {short}"


def _compared(reason: Compared, blocks: int | None) -> str:
    layout = layout_words(reason.strategy)
    conjunction = ", but" if reason.throughput <= 0 and not reason.too_close else " and"
    what = {
        "replicated": layout,
        "sharded": layout,
        "gathered once": f"{layout} gathers parameters once per step instead of "
        f"{_gathers(reason)}{conjunction}",
        "gathered twice": f"{layout} gathers parameters {_gathers(reason)} instead of once per "
        "step and",
        "over all devices": f"{layout} over all {reason.strategy.devices} devices",
        "in groups": layout,
        "divided": layout,
        "divided otherwise": layout,
    }[reason.difference]
    settings, speed = (
        _differing(reason, blocks),
        relative_words(reason.throughput, reason.too_close),
    )
    if reason.fits_only_so:
        told = f"{what} fits only with {settings}, then is {speed}"
    else:
        told = f"{what} is {speed}"
        told += f" (with {settings})" if settings else ""
    return f"{told}{decision_words(reason)}."


def decision_words(reason: Compared) -> str:
    """Why a faster layout was not chosen, as the end of a sentence; empty for a slower one."""
    if reason.decided_by is None:
        return ""
    if reason.decided_by in ("objective", "memory"):
        why = f"it needs {show_memory(reason.more_bytes or 0)} more memory"
    else:
        why = _DECIDED_BY[reason.decided_by]
    return f"{'; ' if reason.too_close else ', but '}{why}"


_DECIDED_BY = {
    "batch": "its batch is farther from the one asked for",
    "headroom": f"it leaves less than {percent(WANTED_HEADROOM)} of usable memory free",
    "simplicity": "the recommended one is simpler",
    "fewer devices per sequence": "the recommended one has less tensor and context parallelism",
    "smaller groups": "the recommended one communicates in smaller groups",
}


def _gathers(reason: Compared) -> str:
    if reason.gathers is None or reason.gathers == 2:
        return "twice"
    return f"twice per micro-batch ({reason.gathers} times per step)"


def _differing(reason: Compared, blocks: int | None) -> str:
    """The settings of another layout that the recommended one has not."""
    strategy = reason.strategy
    parts = [
        _recompute_setting(strategy, blocks) if "recompute" in reason.differing else "",
        f"micro-batch {strategy.micro_batch}" if "micro_batch" in reason.differing else "",
        "plain loss" if "loss" in reason.differing and strategy.loss == "plain" else "",
        unusual_settings(strategy).replace(" · ", ", "),
    ]
    return ", ".join(part for part in parts if part)


def _recompute_setting(strategy: Strategy, blocks: int | None) -> str:
    if isinstance(strategy.recompute, str):
        return "no recompute" if strategy.recompute == "none" else f"{strategy.recompute} recompute"
    return f"recompute of {show_recompute(strategy.recompute, blocks)}"


def _layout_words(layout: Layout) -> str:
    return KIND_NAMES[layout.kind] + mesh_words(layout.mesh)


def _crossover(reason: NetworkCrossover, blocks: int | None) -> str:
    return (
        f"{reason.direction.capitalize()} {write_rate(reason.network)} per device, "
        f"{_layout_words(reason.layout)} would be recommended."
    )


def _divided(reason: Divided, blocks: int | None) -> str:
    """Why devices share sequences, and what it costs."""
    told = f"{_degrees(reason.strategy)}: "
    if reason.sequences is not None:
        told += f"the global batch leaves {reason.sequences:.2g} sequences per device"
    elif reason.undivided is None:
        short = shortfall_words(reason.needed_undivided_bytes or 0, reason.usable_bytes)
        least = short.removeprefix("needs ")
        told += f"without tensor or context parallelism no configuration fits (at least {least})"
    else:
        speed = compared_words(reason.throughput)
        told += f"without it, {layout_words(reason.undivided)} is {speed}"
        if reason.lacks_headroom:
            told += f" and leaves less than {percent(WANTED_HEADROOM)} of usable memory free"
    costs = {"tensor": reason.tensor_share, "context": reason.context_share}
    parts = [
        f"{share_words(share)} of the step in {_INSIDE[axis]}"
        + (" between nodes" if axis in reason.across_nodes else " inside the node")
        for axis, share in costs.items()
        if share is not None
    ]
    return f"{told}; it costs {' and '.join(parts)}."


_INSIDE = {
    "tensor": "all-gathers and reduce-scatters of tensor groups",
    "context": "exchanges of context groups",
}


def _degrees(strategy: Strategy) -> str:
    return strategy.mesh.in_words.removeprefix(" × ").capitalize()


def _link_crossover(reason: LinkCrossover, blocks: int | None) -> str:
    return (
        f"Below {write_byte_rate(reason.link)} inside a node, {_layout_words(reason.layout)} would "
        "be recommended."
    )


def _padding(reason: Padding, blocks: int | None) -> str:
    return (
        f"Sharded over {reason.devices:,} devices, {percent(reason.share)} of the sharded memory "
        "is padding: the rows of some tensors do not divide evenly."
    )


# ---- recompute ------------------------------------------------------------------------------


def _no_recompute(reason: NoRecompute, blocks: int | None) -> str:
    return "No recompute: all activations fit."


def _chunked_loss(reason: ChunkedLoss, blocks: int | None) -> str:
    told = f"Loss in {reason.chunks} chunks: with all logits at once it would need "
    needed = show_memory(reason.needed_plain_bytes)
    if reason.needed_plain_bytes > reason.usable_bytes:
        return f"{told}{needed}, {show_memory(reason.usable_bytes)} are usable."
    return f"{told}{needed} instead of {show_memory(reason.needed_bytes)}."


def _root_split(reason: RootSplit, blocks: int | None) -> str:
    return f"Embedding and head are units of their own: {show_memory(reason.saved_bytes)} less."


def _recomputes(reason: Recomputes, blocks: int | None) -> str:
    cost = f"recompute takes {share_words(reason.share_of_step)} of the step"
    if reason.needed_without_bytes > reason.usable_bytes:
        short = shortfall_words(reason.needed_without_bytes, reason.usable_bytes)
        return f"Without recompute it {short}; {cost}."
    saved = reason.needed_without_bytes - reason.needed_bytes
    return f"Recompute saves {show_memory(saved)}; {cost}."


# ---- the batch ------------------------------------------------------------------------------


def _step_batch(reason: StepBatch, blocks: int | None) -> str:
    ranks = f"{reason.data_parallel:,} device{'s' if reason.data_parallel > 1 else ''}"
    if reason.inner > 1:
        groups = f"group{'s' if reason.data_parallel > 1 else ''}"
        ranks = f"{reason.data_parallel:,} {groups} of {reason.inner} devices"
    factors = [
        ranks,
        f"micro-batch {reason.micro_batch:,}",
        f"{reason.accumulate:,} accumulation steps" if reason.accumulate > 1 else "",
        f"{reason.seq_len:,} tokens",
    ]
    made = " × ".join(factor for factor in factors if factor)
    if reason.asked and reason.tokens != reason.asked:
        return (
            f"Global batch {reason.tokens:,} tokens instead of {reason.asked:,} "
            f"({signed_percent(reason.deviation, 1)}): divides evenly ({made})."
        )
    return f"Tokens per step: {reason.tokens:,} ({made})."


def _micro_batch_gain(reason: MicroBatchGain, blocks: int | None) -> str:
    return (
        f"Micro-batch {reason.micro_batch} is {share_words(reason.gain)} faster than "
        f"{reason.smaller}."
    )


def _batch_capped(reason: BatchCapped, blocks: int | None) -> str:
    return (
        "Larger micro-batches were not tried: most published runs have at most "
        f"{show_count(reason.limit_tokens)} tokens per step and "
        f"{show_count(reason.micro_batch_tokens)} per micro-batch. Set --global-batch to choose "
        "the batch."
    )


def _large_batch(reason: LargeBatch, blocks: int | None) -> str:
    return (
        f"Warning: {show_count(reason.tokens)} tokens per step are more than published runs "
        f"usually have (up to {show_count(reason.limit_tokens)}). Batches this large may need "
        "more tokens to reach the same loss."
    )


def _data_parallel_ends(reason: DataParallelEnds, blocks: int | None) -> str:
    return (
        f"Data parallelism ends at {reason.devices:,} devices for this batch: "
        f"{'each group' if reason.inner > 1 else 'each'} has one sequence per step. More devices "
        f"need a larger batch, shorter sequences, or {'more ' if reason.inner > 1 else ''}tensor "
        "or context parallelism."
    )


# ---- what limits ----------------------------------------------------------------------------


def _limited_by(reason: LimitedBy, blocks: int | None) -> str:
    told = f"Limited by {reason.binding}"
    waits = f"{percent(reason.waiting_share)} of the step waits for communication"
    if reason.binding == "latency":
        without = percent(reason.waiting_without_latency or 0.0)
        told = f"Limited by latency ({waits}; without latency it would be {without})"
    elif reason.binding == "bandwidth":
        told = f"Limited by {reason.binding_link} bandwidth"
        if reason.waiting_share >= SEEN_SHARE:
            told += f" ({waits})"
        else:
            told += " (communication slows the compute that it overlaps)"
    gains = []
    if reason.devices > 1:
        gain = f"2x the {reason.link} bandwidth: {_gain(reason.twice_network)}"
        if reason.with_network is not None:
            other = configuration_words(reason.with_network, blocks=blocks)
            gain += f", or {_gain(reason.planned_again)} with {other}"
        gains.append(gain)
    if reason.twice_link >= SEEN_SHARE:
        gains.append(f"2x the {reason.inner_link} bandwidth: {_gain(reason.twice_link)}")
    if reason.binding == "memory" and reason.with_memory is not None:
        then = configuration_words(reason.with_memory, blocks=blocks)
        told += f": 25% more would allow {then} ({_gain(reason.more_memory)})"
    else:
        gains.append(f"25% more memory: {_gain(reason.more_memory)}")
    return f"{told}. {'; '.join(gains)}." if gains else f"{told}."


def _gain(gain: float) -> str:
    return "no gain" if gain < 0.0005 else f"+{share_words(gain)}"


def _slack(reason: Slack, blocks: int | None) -> str:
    told = f"Headroom: {show_memory(reason.free_bytes)} of usable memory"
    if reason.network_factor is not None and reason.network_factor > 1.05:
        factor = reason.network_factor
        lower = f"over {MOST_SLACK}x" if factor > MOST_SLACK else f"{factor:.1f}x"
        told += f"; {reason.link} bandwidth could be {lower} lower before steps take 5% longer"
    return f"{told}."


# ---- tips -----------------------------------------------------------------------------------


def _risky(reason: RiskyAlternative, blocks: int | None) -> str:
    faster = f" {share_words(reason.gain)} faster" if reason.gain is not None else " likely to fit"
    return (
        f"At risk of running out of memory, but{faster}: "
        f"{configuration_words(reason.strategy, blocks=blocks)} (needs "
        f"{show_memory(reason.needed_bytes)}; fits if the allocator wastes little)."
    )


def _low_precision_reduce(reason: LowPrecisionReduce, blocks: int | None) -> str:
    return (
        f"Reducing gradients in {reason.dtype} would be {share_words(reason.gain)} faster, but "
        "changes the arithmetic: --allow-low-precision-reduce."
    )


def _compile_gain(reason: CompileGain, blocks: int | None) -> str:
    saved = reason.saved_bytes
    memory = f", {show_memory(saved)} less memory" if saved >= MIN_SAVED_BYTES else ""
    return (
        f"torch.compile: predicted {share_words(reason.gain)} faster{memory} (fitted on "
        f"{reason.runs} published runs): --compile."
    )


def asked_words(reason: Alternative) -> str:
    """How to ask for an alternative: options of `plan`, and offload of `estimate`."""
    return "shardwise estimate --offload" if reason.change == "offload" else reason.option


def _alternative(reason: Alternative, blocks: int | None) -> str:
    speed = f" ({compared_words(reason.throughput)})" if reason.throughput is not None else ""
    told = (
        f"Alternative: {asked_words(reason)}, {show_count(reason.tokens_per_s)} tokens/s{speed}, "
        f"needs {show_memory(reason.needed_bytes)}"
    )
    if reason.host_bytes is not None:
        told += (
            f", and {show_memory(reason.host_bytes)} of host memory per device (host links and "
            "memory are assumed, not measured)"
        )
    return f"{told}: {configuration_words(reason.strategy, blocks=blocks)}."


def _shorter_fits(reason: ShorterFits, blocks: int | None) -> str:
    return (
        f"Sequences of up to {reason.tokens:,} tokens fit. Longer ones need more devices or more "
        "memory."
    )


def _other_parallelism(reason: OtherParallelism, blocks: int | None) -> str:
    names = capital(parallelism_words(reason.parallelism))
    are, them = ("are", "them") if len(reason.parallelism) > 1 else ("is", "it")
    return f"{names} {are} not considered: shardwise does not run {them} for this model."


def _gradients_unsharded(reason: GradientsUnsharded, blocks: int | None) -> str:
    return (
        "Cause: gradients stay unsharded until the last of "
        f"{reason.accumulate} micro-batches. Reduced in every micro-batch, it would need "
        f"{show_memory(reason.needed_if_sharded_bytes)}."
    )


# ---- warnings -------------------------------------------------------------------------------


def _stack_leaves_out(reason: StackLeavesOut, blocks: int | None) -> str:
    names = parallelism_words(reason.parallelism)
    told = f"{capital(names)} of this stack {'are' if len(reason.parallelism) > 1 else 'is'} "
    told += "not searched"
    if reason.recommended:
        return f"{told}: a plan with it may be faster."
    return (
        f"{told}, and without it a step waits {percent(reason.waiting_share)} of its time (MFU "
        f"{percent(reason.mfu or 0.0)}): no recommendation. Use the stack's own recipe."
    )


def _beyond_positions(reason: BeyondPositions, blocks: int | None) -> str:
    return (
        f"Sequence length {reason.seq_len:,} is longer than the model's {reason.positions:,} "
        "positions."
    )


def _decimal_length(reason: DecimalLength, blocks: int | None) -> str:
    thousands = reason.seq_len // 1000
    return (
        f"Sequence length {reason.seq_len:,}: {thousands}k means {reason.seq_len:,}, "
        f"{thousands}Ki means {reason.binary:,}."
    )


def _fewer_devices(reason: FewerDevices, blocks: int | None) -> str:
    near = " or ".join(f"{tokens:,}" for tokens in reason.neighbours)
    return (
        f"The global batch of {reason.asked:,} tokens does not divide over {reason.of_devices:,} "
        f"devices: planned for {reason.devices:,} of them. To use all, set --global-batch to "
        f"{near}."
    )


def _only_replicated(reason: OnlyReplicated, blocks: int | None) -> str:
    return (
        f"{reason.optimizer} updates whole matrices: the trainer runs it on one device or with "
        f"DDP, and no sharded layout is searched. {reason.instead} can be sharded, and has small "
        "states too."
    )


def _unfitted_device(reason: UnfittedDevice, blocks: int | None) -> str:
    return unfitted_words(reason.device, reason.evidence)


def _unfitted_experts(reason: UnfittedExperts, blocks: int | None) -> str:
    return (
        f"Few mixtures of experts were fitted: times and memory assume that its {reason.experts} "
        "experts get equally many tokens."
    )


def _unquantized_experts(reason: UnquantizedExperts, blocks: int | None) -> str:
    return f"The experts stay in {reason.kept_in}: {reason.stored} covers linear layers only."


def _no_peer_to_peer(reason: NoPeerToPeer, blocks: int | None) -> str:
    return (
        f"{reason.device} has no peer-to-peer over {reason.link}: tensor parallelism is not "
        "recommended."
    )


def _fragile(reason: Fragile, blocks: int | None) -> str:
    told = (
        f"Fragile: {show_memory(reason.free_bytes)} of usable memory is free "
        f"({percent(reason.headroom)}; {percent(reason.wanted)} is wanted)"
    )
    return told + (", if routing is even." if reason.assumes_even_routing else ".")


# ---- the objective --------------------------------------------------------------------------


def _longest(reason: LongestSequence, blocks: int | None) -> str:
    why = {
        "memory": "Longer ones do not fit.",
        "input": f"Longer ones are refused: {reason.refused}.",
        "search": "Longer ones were not searched.",
    }[reason.limited_by]
    told = f"Longest sequence length: {reason.tokens:,}. {why}"
    if reason.positions is not None:
        told += f" The model has {reason.positions:,} positions."
    return told


def _least_memory(reason: LeastMemory, blocks: int | None) -> str:
    return (
        f"Objective: least memory with at least {percent(reason.share)} of the best throughput "
        f"({show_count(reason.fastest_tokens_per_s)} tokens/s)."
    )


_WORDS: dict[type[Reason], Callable[[Any, int | None], str]] = {
    SingleDevice: _single,
    StatesFit: _states_fit,
    DoesNotFit: _does_not_fit,
    Compared: _compared,
    NetworkCrossover: _crossover,
    Divided: _divided,
    LinkCrossover: _link_crossover,
    Padding: _padding,
    NoRecompute: _no_recompute,
    Recomputes: _recomputes,
    ChunkedLoss: _chunked_loss,
    RootSplit: _root_split,
    StepBatch: _step_batch,
    MicroBatchGain: _micro_batch_gain,
    BatchCapped: _batch_capped,
    LargeBatch: _large_batch,
    DataParallelEnds: _data_parallel_ends,
    LimitedBy: _limited_by,
    Slack: _slack,
    RiskyAlternative: _risky,
    BeyondPositions: _beyond_positions,
    DecimalLength: _decimal_length,
    LowPrecisionReduce: _low_precision_reduce,
    CompileGain: _compile_gain,
    ShorterFits: _shorter_fits,
    OtherParallelism: _other_parallelism,
    GradientsUnsharded: _gradients_unsharded,
    LongestSequence: _longest,
    LeastMemory: _least_memory,
    Alternative: _alternative,
    StackLeavesOut: _stack_leaves_out,
    FewerDevices: _fewer_devices,
    OnlyReplicated: _only_replicated,
    UnfittedDevice: _unfitted_device,
    UnfittedExperts: _unfitted_experts,
    UnquantizedExperts: _unquantized_experts,
    NoPeerToPeer: _no_peer_to_peer,
    Fragile: _fragile,
}


def rule_words(plan: Plan) -> str:
    """The rule that chose."""
    asked = plan.problem.job.global_batch is not None
    return (
        f"Rule: speeds {comparison_words(plan.comparison_error)}, are equal; among equals "
        f"{'the batch asked for, then ' if asked else ''}more headroom (up to "
        f"{percent(WANTED_HEADROOM)} of usable memory), then the simpler."
    )
