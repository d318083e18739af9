"""The section about experts: how evenly routers spread tokens, at every logged step."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.report.page.chart import Axis, Series, chart
from shardwise.report.page.markup import Markup, element, fragment
from shardwise.report.page.subject import Subject
from shardwise.spec.quantity import show_whole

# Metrics of a mixture of experts by their names in metrics.jsonl, each with its words.
_LOADS = {"expert_load": "busiest expert", "rank_load": "busiest rank of an expert group"}
_ENTROPY = "routing_entropy"
ROUTING = (*_LOADS, _ENTROPY)


def experts_section(subjects: Sequence[Subject]) -> Markup | None:
    """Charts of the load of experts and of the entropy of routing; None without experts."""
    x = Axis("step", show_whole)
    loads = _lines(subjects, _LOADS)
    entropies = _lines(subjects, {_ENTROPY: "entropy of routing"})
    if not loads and not entropies:
        return None
    load = Axis("tokens over their mean", lambda value: f"{value:.3g}")
    entropy = Axis("0 one expert, 1 all alike", lambda value: f"{value:.3g}")
    return fragment(
        element("p", "Measured, in the block that is least even. No token is dropped."),
        chart(x, load, loads, "Tokens of the busiest expert and rank over the mean, by step."),
        chart(x, entropy, entropies, "Entropy of tokens over experts, by step."),
    )


def _lines(subjects: Sequence[Subject], names: dict[str, str]) -> list[Series]:
    """A line per subject and metric that was logged more than once."""
    found = [
        (f"{one.name}, {words}" if len(subjects) > 1 else words, one.routing[name])
        for one in subjects
        for name, words in names.items()
        if len(one.routing.get(name, ())) > 1
    ]
    return [Series(name, points, "measured", n) for n, (name, points) in enumerate(found)]
