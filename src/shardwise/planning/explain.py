"""Why a configuration was chosen, in sentences with the numbers that decided."""

from __future__ import annotations

from shardwise.planning.limits import Limits, crossover
from shardwise.planning.price import price_one
from shardwise.planning.problem import Problem, Units
from shardwise.planning.rows import Candidate
from shardwise.planning.search import Found, Search
from shardwise.spec.dtype import DTYPE_BYTES
from shardwise.spec.quantity import show_gib, write_rate
from shardwise.spec.strategy import Strategy, show_recompute

# Padding below this share is no reason for anything.
WORTH_TELLING = 0.05


def reasons(search: Search, found: Found, winner: Candidate) -> list[str]:
    """From the layout to the batch."""
    problem, units = search.problem, search.units
    sentences = [
        *_layout(search, found, winner),
        *_recompute(problem, units, found, winner),
        *_batch(problem, units, found, winner),
    ]
    return [sentence for sentence in sentences if sentence]


def _percent(ratio: float) -> str:
    size = abs(ratio)
    return f"{size:.0%}" if size >= 0.0095 else f"{size:.1%}"


def _slower(other: Candidate, winner: Candidate) -> str:
    ratio = other.tokens_per_s / winner.tokens_per_s - 1
    if ratio > 0.0005:
        return f"only {_percent(ratio)} faster"
    return f"{_percent(ratio)} slower" if ratio < -0.0005 else "as fast"


def _layout(search: Search, found: Found, winner: Candidate) -> list[str]:
    strategy = winner.strategy
    if strategy.kind == "single":
        return ["One device: there is nothing to share."]
    if strategy.kind == "ddp":
        return _not_sharded(search, found, winner)
    sentences = [_instead_of_ddp(found, winner)]
    if strategy.kind == "zero3":
        sentences.append(_instead_of(found, winner, "zero2"))
    else:
        sentences.append(_instead_of(found, winner, "zero3"))
    sentences.append(_groups(search, found, winner))
    sentences.append(_padding(search, winner))
    return sentences


def _padding(search: Search, winner: Candidate) -> str:
    """Tensors with fewer rows than devices are padded; experts stored as rows most of all."""
    units, devices = search.units.of(winner.strategy), search.problem.cluster.devices
    empty = 1 - units.numel / sum(unit.padded_numel(devices) for unit in units.units)
    if empty < WORTH_TELLING:
        return ""
    return (
        f"Sharded over all {devices} devices, {empty:.0%} of what they hold would be padding: some "
        "tensors have fewer rows than that."
    )


def _not_sharded(search: Search, found: Found, winner: Candidate) -> list[str]:
    numel = search.units.of(winner.strategy).numel
    each = DTYPE_BYTES[winner.strategy.master_dtype]
    state = numel * each * (2.0 + search.problem.states)
    others = [c for c in found.layouts() if c.strategy.sharded]
    text = f"Do not shard: parameters, gradients and optimizer states are {show_gib(state)} and "
    text += "fit on every device"
    if others:
        best = others[0]
        text += f"; {best.layout} would be {_slower(best, winner)}"
        if best.tokens_per_s > 1.02 * winner.tokens_per_s:
            text += ", less than such a prediction can tell apart"
    return [text + "."]


def _instead_of_ddp(found: Found, winner: Candidate) -> str:
    ddp = found.best("ddp")
    if ddp is not None:
        return f"ddp would be {_slower(ddp, winner)}."
    nearest = found.nearest.get("ddp")
    if nearest is None:
        return ""
    return (
        f"ddp needs at least {show_gib(nearest.needed_bytes)} per device: the state must be shared."
    )


def _instead_of(found: Found, winner: Candidate, kind: str) -> str:
    """The same groups with parameters kept, or not kept, between forward and backward."""
    other = str(winner.strategy).replace(winner.strategy.kind, kind)
    candidate = found.best(other)
    if candidate is None:
        nearest = found.nearest.get(other)
        if nearest is None or kind == "zero3":
            return ""
        return (
            f"{kind} keeps the whole model gathered: at least {show_gib(nearest.needed_bytes)} per "
            "device."
        )
    if kind == "zero3":
        return f"{kind} would gather everything twice and be {_slower(candidate, winner)}."
    how = _differs(candidate.strategy, winner.strategy)
    return f"{kind} would gather only once, but be {_slower(candidate, winner)}{how}."


def _differs(strategy: Strategy, winner: Strategy) -> str:
    """What a rival has to do differently to fit."""
    parts = []
    if strategy.recompute != winner.recompute:
        parts.append(f"recompute {show_recompute(strategy.recompute)}")
    if strategy.micro_batch != winner.micro_batch:
        parts.append(f"micro-batch {strategy.micro_batch}")
    return f" ({', '.join(parts)} to fit)" if parts else ""


def _groups(search: Search, found: Found, winner: Candidate) -> str:
    """Why the shards are spread as they are, and the network at which that changes."""
    strategy, network = winner.strategy, search.problem.cluster.network
    if search.problem.cluster.nodes == 1 or network is None:
        return ""
    turn = crossover(search, winner)
    rate = write_rate(_rounded(network * turn.factor)) if turn else ""
    if strategy.hybrid:
        other = found.best(strategy.kind)
        if other is None:
            return f"Sharded over all {strategy.devices} devices it does not fit."
        text = (
            f"Groups of {strategy.shard} keep gathers near; over all {strategy.devices} devices "
            f"it would be {_slower(other, winner)}."
        )
        return text + (f" From {rate} per device on, that would be the choice." if turn else "")
    rivals = [c for c in found.layouts() if c.strategy.hybrid]
    if not rivals:
        return "Smaller groups do not fit."
    if turn:
        shard = turn.choice.strategy.shard
        rivals = [c for c in rivals if c.strategy.shard == shard] or rivals
    # The smallest groups differ most; those near to all devices are the same thing.
    other = min(rivals, key=lambda c: c.strategy.shard or 1)
    text = f"Groups of {other.strategy.shard} would be {_slower(other, winner)}"
    text += _differs(other.strategy, strategy) + "."
    return text + (f" Below {rate} per device, they would be the choice." if turn else "")


def _rounded(rate: float) -> float:
    """Two digits, in bits: what a crossover deserves."""
    return float(f"{rate * 8:.2g}") / 8


def _recompute(problem: Problem, units: Units, found: Found, winner: Candidate) -> list[str]:
    strategy = winner.strategy
    if strategy.recompute == "none":
        return ["Activations fit as they are: nothing is recomputed."]
    kept = price_one(problem, units, strategy.but(recompute="none"))
    cost = kept.step_s / winner.step_s - 1
    if kept.needed_bytes > found.limit_bytes:
        why = f"Without recomputation it would need {show_gib(kept.needed_bytes)}"
    else:
        why = f"Recomputation saves {show_gib(kept.needed_bytes - winner.needed_bytes)}"
    return [f"{why}; recomputing takes {_percent(cost)} of the step."]


def _batch(problem: Problem, units: Units, found: Found, winner: Candidate) -> list[str]:
    strategy = winner.strategy
    if problem.job.global_batch is not None:
        if strategy.accumulate == 1:
            return []
        return [f"The batch takes {strategy.accumulate} micro-batches of {strategy.micro_batch}."]
    smaller = strategy.micro_batch // 2
    if smaller < 1:
        return []
    half = price_one(problem, units, strategy.but(micro_batch=smaller))
    gain = winner.tokens_per_s / half.tokens_per_s - 1
    if gain < 0.005:
        return []
    behind = ", and more work to hide communication behind" if strategy.devices > 1 else ""
    return [
        f"Micro-batch {strategy.micro_batch} instead of {smaller} brings {_percent(gain)}: larger "
        f"matmuls{behind}."
    ]


def limits_in_words(problem: Problem, winner: Candidate, limits: Limits) -> list[str]:
    """What binds, and what is left."""
    device = problem.cluster.device
    here = "link between processes" if device.is_cpu else device.link
    link = "network" if problem.cluster.nodes > 1 else here
    twice = f"twice the {link} would bring {_percent(limits.twice_network)}"
    memory = f"25% more memory {_percent(limits.more_memory)}"
    waits = winner.exposed_s / winner.step_s
    if limits.binding == "bandwidth":
        first = f"Limited by the {link}: {waits:.0%} of the step waits for it; {twice}, {memory}."
    elif limits.binding == "memory":
        first = f"Limited by memory: {memory.replace('more memory', 'more would bring')}"
        first += _with_memory(winner, limits) + (
            f"; {twice}." if winner.strategy.devices > 1 else "."
        )
    elif winner.strategy.devices > 1:
        first = f"Limited by compute: {twice}, {memory}."
    else:
        first = f"Limited by compute: {memory.replace('more memory', 'more memory would bring')}."
    slack = [f"{show_gib(limits.free_bytes)} per device are left"]
    if limits.network_slack is None and winner.strategy.devices > 1:
        slack.append(f"no slower {link} in reach would cost 5%")
    elif limits.network_slack is not None and limits.network_slack > 1.05:
        slack.append(f"the {link} could be {limits.network_slack:.1f}x slower before it costs 5%")
    return [first, "Slack: " + "; ".join(slack) + "."]


def _with_memory(winner: Candidate, limits: Limits) -> str:
    if limits.with_memory is None:
        return ""
    changed = _differs(limits.with_memory.strategy, winner.strategy).replace(" to fit)", ")")
    return changed or f" ({limits.with_memory.layout})"
