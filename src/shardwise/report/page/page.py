"""The HTML page: one file without external resources, in which only its own script can run."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

from shardwise.observe.diagnosis.verdict import OVERLAPPING
from shardwise.report.page.against import deviation_section
from shardwise.report.page.chart import Axis, Series, chart
from shardwise.report.page.experts import experts_section
from shardwise.report.page.headline import description_line, figure_tiles, verdict
from shardwise.report.page.markup import Content, Markup, element, fragment
from shardwise.report.page.memory import memory_section
from shardwise.report.page.plans import front_section, plan_section, whatif_section
from shardwise.report.page.ranks import ranks_section
from shardwise.report.page.style import page_style, resource
from shardwise.report.page.subject import Subject
from shardwise.report.page.sweeps import sweep_section
from shardwise.report.page.time import time_section
from shardwise.report.page.timeline import timeline_section
from shardwise.report.page.units import units_section
from shardwise.spec.quantity import show_whole
from shardwise.spec.version import __version__

_MEANING = {
    "predicted": "computed from formulas, without a run",
    "simulated": "computed by simulating one step on its streams, without a run",
    "measured": "observed in a run, or read from its traces",
}


def write_page(subjects: Sequence[Subject], command: str) -> str:
    """The HTML page about these subjects; `command` is the command line to show on it."""
    first = subjects[0]
    title = first.name if len(subjects) == 1 else f"{len(subjects)} runs compared"
    sections: dict[str, Content] = {
        "Plan": plan_section(first.plan) if first.plan is not None else None,
        "Sweep": sweep_section(subjects),
        "Predicted and measured": deviation_section(subjects),
        "Memory": memory_section(subjects),
        "Time": time_section(subjects),
        "Timeline": timeline_section(subjects),
        "Causes": _causes(subjects),
        "Ranks": ranks_section(subjects),
        "FSDP units": units_section(subjects),
        "Memory and speed": front_section(first.plan) if first.plan is not None else None,
        "What if": whatif_section(first) if len(subjects) == 1 else None,
        "Loss": _loss_chart(subjects),
        "Experts": experts_section(subjects),
        "Provenance": _provenance(subjects, command),
    }
    there = {name: content for name, content in sections.items() if content}
    body = fragment(
        element("a", "Skip to the content", href="#content", class_="skip"),
        element(
            "header",
            element("p", "Shardwise report", class_="brand"),
            element("h1", title),
            element(
                "p",
                description_line(first) if len(subjects) == 1 else _names(subjects),
                class_="about",
            ),
            verdict(subjects),
            figure_tiles(first) if len(subjects) == 1 else None,
        ),
        element(
            "nav",
            element(
                "ul", [element("li", element("a", n, href=f"#{_element_id(n)}")) for n in there]
            ),
            aria_label="sections",
        ),
        element(
            "main",
            [
                element("section", element("h2", name), content, id=_element_id(name))
                for name, content in there.items()
            ],
            id="content",
        ),
        element("footer", f"Shardwise {__version__}"),
    )
    return _document(title, body)


def _document(title: str, body: Markup) -> str:
    """A full HTML document with its style, script and content security policy."""
    script = resource("timeline.js")
    # The policy lets only this script run, whatever text a file brings into the page.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    head = fragment(
        Markup('<meta charset="utf-8">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        Markup('<link rel="icon" href="data:,">'),
        element("title", f"{title} · Shardwise"),
        element("style", page_style()),
    )
    page = element(
        "html", element("head", head), element("body", body, element("script", Markup(script))),
        lang="en",
    )  # fmt: skip
    return f"<!doctype html>\n{page}\n"


def _element_id(name: str) -> str:
    """A section title as the id of an HTML element."""
    return name.lower().replace(" ", "-")


def _names(subjects: Sequence[Subject]) -> str:
    """Names of at most eight subjects, and how many more there are."""
    shown = [one.name for one in subjects[:8]]
    more = f" and {len(subjects) - 8} more" if len(subjects) > 8 else ""
    return ", ".join(shown) + more


def _causes(subjects: Sequence[Subject]) -> Markup | None:
    """All causes of lost time, each with its suggested fix; None without any."""
    parts = []
    for one in subjects:
        if one.traced is None or not one.traced.verdicts:
            continue
        worded = [verdict.explain(one.traced.health) for verdict in one.traced.verdicts]
        items = [
            element("li", element("b", v.result), f" {v.evidence} Suggested fix: {v.fix}")
            for v in worded
        ]
        name = element("h3", one.name) if len(subjects) > 1 else None
        parts.append(fragment(name, element("ol", items, class_="reasons")))
    if not parts:
        return None
    lead = f"Measured, the largest first. {OVERLAPPING}"
    return fragment(element("p", lead), parts)


def _loss_chart(subjects: Sequence[Subject]) -> Markup | None:
    """Chart of the loss at every logged step, and of held-out losses; None without losses."""
    lines = [
        Series(one.name, one.losses, "measured", number)
        for number, one in enumerate(subjects) if len(one.losses) > 1
    ]  # fmt: skip
    lines += [
        Series(f"{one.name}, held out", one.held_out, "measured", len(subjects) + number)
        for number, one in enumerate(subjects) if one.held_out
    ]  # fmt: skip
    if not lines:
        return None
    x = Axis("step", show_whole)
    return chart(x, Axis("loss", lambda v: f"{v:.4g}"), lines, "Loss at every logged step.")


def _provenance(subjects: Sequence[Subject], command: str) -> Markup:
    """How the figures were obtained: commands, notes, kinds of figures, MFU convention."""
    commands = list(dict.fromkeys([*(c for one in subjects for c in one.commands), command]))
    notes = list(dict.fromkeys(note for one in subjects for note in one.notes))
    meaning = [
        [element("dt", element("span", kind, class_=f"kind {kind}")), element("dd", text)]
        for kind, text in _MEANING.items()
    ]
    conventions = {p.throughput.mfu_convention for one in subjects for p in one.profiles
                   if p.throughput is not None} - {None}  # fmt: skip
    by = sorted({p.provenance.shardwise for one in subjects for p in one.profiles})
    return fragment(
        element("pre", element("code", "\n".join(commands)), tabindex="0"),
        [element("p", note) for note in notes],
        element("dl", meaning, class_="meaning"),
        [element("p", f"MFU: {convention}.", class_="fine") for convention in conventions],
        element("p", f"Computed by Shardwise {', '.join(by)}.", class_="fine") if by else None,
    )
