"""What a notebook displays for a plan, a profile or a comparison: sections of the report."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.planning.plan import Plan
from shardwise.report.page.against import deviation_section
from shardwise.report.page.headline import description_line, figure_tiles, verdict
from shardwise.report.page.markup import Content, Markup, element
from shardwise.report.page.memory import memory_section
from shardwise.report.page.plans import plan_section
from shardwise.report.page.style import cell_style
from shardwise.report.page.subject import Subject
from shardwise.report.page.time import time_section
from shardwise.step.comparison import Comparison
from shardwise.step.profile import StepProfile
from shardwise.step.words import strategy_words


def record_cell(record: object) -> str:
    """HTML for a Plan, a StepProfile, a Comparison, a Trace or a MemoryAnalysis."""
    if isinstance(record, Plan):
        return _plan_cell(record)
    if isinstance(record, Comparison):
        return _comparison_cell(record.names, record.profiles)
    if not isinstance(record, StepProfile):
        return _measured_cell(record)
    return _cell([_subject(strategy_words(record), record)])


def _measured_cell(record: object) -> str:
    """HTML for traces or memory recordings; their readers are imported only here."""
    from shardwise.observe.analysis import Trace
    from shardwise.observe.memory.analysis import MemoryAnalysis
    from shardwise.report.memory import memory_text

    if isinstance(record, Trace):
        return _cell([Subject("trace", "", traced=record)])
    assert isinstance(record, MemoryAnalysis)
    return str(element("pre", memory_text(record)))


def _comparison_cell(names: Sequence[str], profiles: Sequence[StepProfile]) -> str:
    """HTML for profiles compared; a prediction and its measurement are one subject."""
    kinds = [profile.provenance.kind for profile in profiles]
    if len(profiles) == 2 and kinds.count("measured") == 1:
        measured = profiles[kinds.index("measured")]
        predicted = profiles[1 - kinds.index("measured")]
        return _cell([Subject("step", "", predicted=predicted, measured=measured)])
    return _cell([_subject(name, profile) for name, profile in zip(names, profiles, strict=True)])


def _subject(name: str, profile: StepProfile) -> Subject:
    """A profile as a subject, predicted or measured by its kind."""
    if profile.provenance.kind == "measured":
        return Subject(name, "", measured=profile)
    return Subject(name, "", predicted=profile)


def _plan_cell(plan: Plan) -> str:
    """HTML for a plan, with the predicted step of its winner."""
    subject = Subject(plan.problem.model.name, "", plan=plan)
    if plan.winner is not None:
        subject = subject._replace(predicted=plan.profile(plan.winner))
    return _cell([subject], plan_section(plan))


def _cell(subjects: Sequence[Subject], reasons: Content = None) -> str:
    """HTML for subjects: verdict, tiles and sections, with styles that reach only this cell."""
    first, alone = subjects[0], len(subjects) == 1
    sections: dict[str, Content] = {
        "Why": reasons,
        "Predicted and measured": deviation_section(subjects),
        "Memory": memory_section(subjects),
        "Time": time_section(subjects),
    }
    drawn: list[Markup] = [
        element("section", element("h3", name), content)
        for name, content in sections.items()
        if content
    ]
    return str(
        element(
            "div",
            element("style", cell_style()),
            element("p", description_line(first), class_="about")
            if alone and first.profile
            else None,
            verdict(subjects),
            figure_tiles(first) if alone else None,
            drawn,
            class_="shardwise",
        )
    )
