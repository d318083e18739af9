"""The base class of a plan's reasons, and the words for shares and speeds.

Throughputs are relative to the recommended configuration: -0.1 is 10 % slower. Bytes are per
device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from shardwise.planning.layout import Layout
from shardwise.predict.rates import comparison_error
from shardwise.spec.strategy import Strategy
from shardwise.step.words import percent

# Most extra digits of a speed that is just beyond the comparison error.
_MOST_DIGITS = 3


@dataclass(frozen=True, kw_only=True)
class Reason(ABC):
    """One reason of a plan. `kind` is its name in JSON."""

    kind: ClassVar[str]

    @abstractmethod
    def words(self, blocks: int | None = None) -> str:
        """The reason in one sentence or two. `blocks` is the model's number of blocks, if known."""

    def brief(self, blocks: int | None = None) -> str:
        """The reason in one short sentence."""
        return self.words(blocks)

    def to_dict(self) -> dict[str, Any]:
        """The reason as `--json` prints it; fields that are None are absent."""
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            "kind": self.kind,
            **{name: _plain(name, value) for name, value in known.items() if value is not None},
        }


def _plain(name: str, value: Any) -> Any:
    """A field's value for JSON: records as dicts, bytes rounded."""
    if isinstance(value, Strategy):
        return value.model_dump(mode="json", exclude={"within_node"})
    if isinstance(value, Layout):
        return value.to_dict()
    return round(value) if name.endswith("_bytes") else value


def share_words(share: float) -> str:
    """A share as text, without its sign: in whole percent, with one decimal below 1 %."""
    size = abs(share)
    return percent(size) if size >= 0.0095 else percent(size, 1)


def speed_words(throughput: float) -> str:
    """A relative difference in throughput as text: "12% slower" for -0.12, "as fast" for 0.

    Below -0.5 as a multiple: "2.5x slower" for -0.6.
    """
    if abs(throughput) < 0.0005:
        return "as fast"
    if throughput < -0.5:
        return f"{1 / (1 + throughput):,.1f}x slower"
    size, error, digits = abs(throughput), comparison_error(), 0
    # A speed beyond the comparison error must not be rounded to a value within it.
    while round(size, 2 + digits) <= error < size and digits < _MOST_DIGITS:
        digits += 1
    shown = percent(size, digits) if digits else share_words(size)
    return f"{shown} {'slower' if throughput < 0 else 'faster'}"


def relative_words(throughput: float, too_close: bool) -> str:
    """A relative difference in throughput as text (see `speed_words`), or "too close to call"."""
    return "too close to call" if too_close else speed_words(throughput)


def compared_words(throughput: float) -> str:
    """A relative difference in throughput as text: "12% slower" for -0.12.

    "too close to call" within the comparison error.
    """
    return relative_words(throughput, abs(throughput) <= comparison_error())
