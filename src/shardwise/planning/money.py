"""Cost of training: time and money for a number of tokens, and the cheapest number of devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from shardwise.planning.problem import Problem
from shardwise.planning.rows import Candidate
from shardwise.planning.search import Search
from shardwise.planning.space import Space
from shardwise.predict.intervals import Regime, error_interval
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.instance import find_instance
from shardwise.spec.quantity import QuantityError, parse_count
from shardwise.spec.record import Problems, SpecError

# A preference, not a measurement: halving the time may cost this share more. Screens say so.
HALF_THE_TIME = 0.02
# Share of the time lost to failures, per device: Llama 3 405B trained more than 90 % of the time on
# 16,384 devices, with 8 unexpected interruptions a day (The Llama 3 Herd of Models, 3.3.4).
FAILURES_PER_DEVICE = 0.1 / 16_384
HOUR = 3600.0
DAY = 24 * HOUR
# Costs are stated for this many tokens if the budget gives no number.
BILLION = 1e9

Price = float | Mapping[str, float]


class Cost(NamedTuple):
    """The cost of training on `tokens`; per billion tokens if the budget gives no number."""

    tokens: float | None
    # None without a number of tokens.
    seconds: float | None
    device_hours: float
    # None without a price.
    money: float | None
    # Relative error of all of these, in nine of ten runs; the upper end includes failures.
    interval: tuple[float, float] = (0.0, 0.0)
    # The share of the time that is allowed for failures.
    failures: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """The cost as `--json` prints it: keys name the tokens, unknown values are absent."""
        per = "" if self.tokens is not None else "_per_billion_tokens"
        figures = {
            "tokens": self.tokens,
            "seconds": self.seconds,
            f"device_hours{per}": self.device_hours,
            f"money{per}": self.money,
        }
        known = {key: value for key, value in figures.items() if value is not None}
        return {**known, "interval": list(self.interval), "failures": self.failures}


class ListPrice(NamedTuple):
    """A provider's on-demand price of an instance, in US dollars per GPU-hour, and its day."""

    instance: str
    usd_per_gpu_hour: float
    day: str


class Budget(NamedTuple):
    """Tokens to train on, price per device-hour and deadline; each optional.

    `price` is one number for all devices, or one per device by its name.
    """

    tokens: float | None = None
    price: Price | None = None
    deadline_s: float | None = None
    # The kind of runs whose error interval applies.
    regime: Regime = "dense"
    # Where the price is from, if nobody gave one.
    listed: ListPrice | None = None

    @property
    def given(self) -> bool:
        """Whether tokens or a price are given."""
        return self.tokens is not None or self.price is not None

    def with_list_price(self, cluster: ClusterSpec, *, asked: bool = False) -> Budget:
        """The budget with the price of the cluster's instance.

        Unchanged if it has a price, or neither tokens nor `asked` costs need one.
        """
        listed = list_price(cluster)
        if self.price is not None or listed is None or not (asked or self.tokens is not None):
            return self
        return self._replace(price={cluster.device.name: listed.usd_per_gpu_hour}, listed=listed)

    def price_of(self, device: str) -> float | None:
        """Price per device-hour; None without prices.

        Raises SpecError if prices are given by device but not for this one.
        """
        if self.price is None or isinstance(self.price, (int, float)):
            return self.price
        folded = {name.lower(): price for name, price in self.price.items()}
        if device.lower() not in folded:
            known = ",".join(f"{name}={price:g}" for name, price in self.price.items())
            raise SpecError(
                f"price: no price for {device}; add it, such as --price {known},{device}=2.5"
            )
        return folded[device.lower()]

    def cost(self, tokens_per_s: float, cluster: ClusterSpec) -> Cost:
        """Time, device-hours and money of the budget's tokens at this speed on this cluster."""
        seconds = (self.tokens or BILLION) / tokens_per_s
        hours = seconds * cluster.devices / HOUR
        price = self.price_of(cluster.device.name)
        return Cost(
            tokens=self.tokens,
            seconds=None if self.tokens is None else seconds,
            device_hours=hours,
            money=None if price is None else hours * price,
            interval=self.interval(cluster),
            failures=failure_share(cluster),
        )

    def upper_s(self, tokens_per_s: float, cluster: ClusterSpec) -> float | None:
        """Seconds at the upper end of the 90 % interval; None without a number of tokens."""
        if self.tokens is None:
            return None
        return self.tokens / tokens_per_s * (1 + self.interval(cluster)[1])

    def interval(self, cluster: ClusterSpec) -> tuple[float, float]:
        """Relative error (low, high) of time and money in nine of ten runs.

        The step's error interval; the upper end includes failures.
        """
        low, high = error_interval(cluster, self.regime)
        return low, (1 + high) / (1 - failure_share(cluster)) - 1

    def in_time(self, tokens_per_s: float) -> bool:
        """Whether training on the budget's tokens meets the deadline; true without a deadline."""
        if self.tokens is None or self.deadline_s is None:
            return True
        return self.tokens / tokens_per_s <= self.deadline_s


def list_price(cluster: ClusterSpec) -> ListPrice | None:
    """The list price of the cluster's instance; None without an instance or a price."""
    found = None if cluster.instance is None else find_instance(cluster.instance)
    if found is None or found.usd_per_gpu_hour is None or found.priced is None:
        return None
    return ListPrice(found.name, found.usd_per_gpu_hour, found.priced)


def failure_share(cluster: ClusterSpec) -> float:
    """The share of training time that is allowed for failures and replayed steps, at most 0.5."""
    return min(0.5, FAILURES_PER_DEVICE * cluster.devices)


def read_price(text: str | float) -> Price:
    """Read a price per device-hour: `2.5`, or by device: `H100-SXM=2.5,A100-80GB=1.6`."""
    parts = [part.strip() for part in str(text).split(",") if part.strip()]
    if len(parts) == 1 and "=" not in parts[0]:
        return _positive_price(parts[0], str(text))
    prices = {}
    for part in parts:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals):
            raise _unreadable(str(text))
        prices[name] = _positive_price(value, str(text))
    if not prices:
        raise _unreadable(str(text))
    return prices


def _positive_price(number: str, text: str) -> float:
    """Read a price per GPU-hour, above 0 and below 1e12; SpecError if it is not one.

    `text` is the full input, which the error cites if `number` is no number.
    """
    try:
        value = float(number)
    except ValueError:
        raise _unreadable(text) from None
    if not 0 < value < 1e12:
        raise SpecError(f"price: {number} is not a price per GPU-hour; give a number above 0")
    return value


def _unreadable(text: str) -> SpecError:
    return SpecError(
        f"price: cannot read {text[:60]!r}; write --price 2.5, or per device "
        "--price H100-SXM=2.5,A100-80GB=1.6"
    )


# ---- the cheapest number of devices ---------------------------------------------------------


def smaller_clusters(cluster: ClusterSpec) -> list[ClusterSpec]:
    """Parts of the cluster, the smallest first: parts of a node, full nodes, the full cluster.

    Instances are rented whole, so they have no parts of a node.
    """
    steps = sorted({base * 2**power for base in (1, 3) for power in range(20)})
    parts = [
        cluster.but(nodes=1, devices_per_node=size)
        for size in steps
        if size < cluster.devices_per_node and cluster.instance is None
    ]
    nodes = [count for count in steps if count < cluster.nodes]
    return [*parts, *(cluster.but(nodes=count) for count in nodes), cluster]


class SizedCandidate(NamedTuple):
    """The best configuration on a part of the cluster."""

    cluster: ClusterSpec
    candidate: Candidate

    @property
    def cost(self) -> float:
        """Device-seconds per token."""
        return self.cluster.devices / self.candidate.tokens_per_s

    @property
    def score(self) -> float:
        """Log of the cost plus a penalty for slowness; the smallest score is the best."""
        worth = math.log2(1 + HALF_THE_TIME)
        return math.log(self.cost) - worth * math.log(self.candidate.tokens_per_s)


def by_size(problem: Problem, space: Space | None = None) -> list[SizedCandidate]:
    """The best configuration of a coarse search on each part of the cluster where one fits."""
    found = []
    coarse = (space or Space()).coarse()
    for cluster in smaller_clusters(problem.cluster):
        try:
            best = Search(problem._replace(cluster=cluster), coarse).run().best()
        except SpecError:  # fewer sequences per step than devices
            continue
        if best is not None:
            found.append(SizedCandidate(cluster, best))
    return found


SizeReason = Literal["no configuration fits", "none in time", "cheapest", "faster for little more"]


class SizeChoice(NamedTuple):
    """The number of devices to train on, and how its cost compares with other sizes."""

    sizes: list[SizedCandidate]
    all_devices: int
    reason: SizeReason
    # None if no configuration fits or no size meets the deadline.
    chosen: SizedCandidate | None
    # The least cost of the sizes that meet the deadline, and of all sizes.
    cheapest_in_time: SizedCandidate | None
    cheapest: SizedCandidate | None

    @property
    def deadline_costs(self) -> bool:
        """Whether a cheaper size was not chosen because it misses the deadline."""
        if self.chosen is None or self.cheapest is None or self.cheapest_in_time is None:
            return False
        return self.cheapest.cost < self.cheapest_in_time.cost

    def to_dict(self, budget: Budget) -> dict[str, Any]:
        """The sizes and the choice as `--json` prints them."""
        return {
            "reason": self.reason,
            "half_the_time": HALF_THE_TIME,
            "devices": self.chosen.cluster.devices if self.chosen else None,
            "cheapest_devices": self.cheapest.cluster.devices if self.cheapest else None,
            "sizes": [
                {
                    "devices": size.cluster.devices,
                    "layout": str(size.candidate.strategy),
                    "tokens_per_s": size.candidate.tokens_per_s,
                    **budget.cost(size.candidate.tokens_per_s, size.cluster).to_dict(),
                }
                for size in self.sizes
            ],
        }


def choose_size(
    sizes: list[SizedCandidate], budget: Budget, all_devices: int, devices: int | None = None
) -> SizeChoice:
    """Choose the cheapest size that meets the deadline; halving the time may cost HALF_THE_TIME.

    `devices` is a size that was already chosen; it is kept if it meets the deadline.
    """
    if not sizes:
        return SizeChoice(sizes, all_devices, "no configuration fits", None, None, None)
    cheapest = min(sizes, key=_cost)
    in_time = [size for size in sizes if budget.in_time(size.candidate.tokens_per_s)]
    if not in_time:
        return SizeChoice(sizes, all_devices, "none in time", None, None, cheapest)
    least = min(in_time, key=_cost)
    named = [size for size in in_time if size.cluster.devices == devices]
    chosen = min(named or in_time, key=lambda size: size.score)
    reason: SizeReason = "faster for little more" if least.cost < chosen.cost else "cheapest"
    return SizeChoice(sizes, all_devices, reason, chosen, least, cheapest)


def _cost(size: SizedCandidate) -> float:
    """Device-seconds per token."""
    return size.cost


def read_budget(
    tokens: str | int | None = None,
    price: str | float | None = None,
    deadline_days: float | None = None,
) -> Budget:
    """Read a budget: tokens such as "1T", a price per device-hour, a deadline in days.

    `price` is a number, or one per device: "H100-SXM=2.5,A100-80GB=1.6".
    """
    problems = Problems()
    count = rate = None
    if deadline_days is not None and tokens is None:
        problems.found.append("deadline: needs --tokens, such as --tokens 1T")
    if deadline_days is not None and not 0 < deadline_days < 1e6:
        problems.found.append(
            f"deadline: {deadline_days:g} days is out of range; give days above 0"
        )
    with problems.collect():
        rate = read_price(price) if price is not None else None
    with problems.collect():
        try:
            count = parse_count(str(tokens)) if tokens is not None else None
        except QuantityError as error:
            raise SpecError(f"tokens: {error}") from None
        if count is not None and count < 1:
            raise SpecError("tokens: must be at least 1; write it like 300B or 1T")
    problems.raise_if_any()
    return Budget(count, rate, None if deadline_days is None else deadline_days * DAY)
