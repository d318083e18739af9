"""What every reason of a plan has, and the words for shares and speeds.

Throughputs are relative to the chosen configuration: -0.1 is 10 % slower. Bytes are per device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from shardwise.planning.layout import Layout
from shardwise.predict.rates import comparison_error
from shardwise.spec.strategy import Strategy
from shardwise.step.words import percent

# Of a speed just beyond the error of comparison.
_MOST_DIGITS = 3


@dataclass(frozen=True, kw_only=True)
class Reason(ABC):
    """One reason. `kind` names it in JSON."""

    kind: ClassVar[str]

    @abstractmethod
    def words(self, blocks: int | None = None) -> str:
        """One sentence or two. `blocks` is the model's number of blocks, where it is known."""

    def brief(self, blocks: int | None = None) -> str:
        """One sentence, where the full words take more."""
        return self.words(blocks)

    def to_dict(self) -> dict[str, Any]:
        """The reason as `--json` prints it; what is not known is absent."""
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            "kind": self.kind,
            **{name: _plain(name, value) for name, value in known.items() if value is not None},
        }


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Strategy):
        return value.model_dump(mode="json", exclude={"within_node"})
    if isinstance(value, Layout):
        return value.to_dict()
    return round(value) if name.endswith("_bytes") else value


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
