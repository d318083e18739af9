"""The page as a browser and a reader of files meet it."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise
from benchmarks.scale.pages import measure
from shardwise.observe.diagnosis.stragglers import Straggler
from shardwise.planning.api import plan_run
from shardwise.report.page.headline import figure_tiles, headline
from shardwise.report.page.markup import element
from shardwise.report.page.page import write_page
from shardwise.report.page.read import read_subjects
from shardwise.report.page.timeline import Step, steps_json, thin_out
from shardwise.spec.quantity import show_seconds
from shardwise.spec.question import describe_run
from shardwise.spec.record import SpecError
from shardwise.spec.run import write_run
from shardwise.spec.strategy_words import layout_words
from shardwise.step.breakdown import breakdown
from shardwise.step.profile import Provenance, StepProfile, TimeProfile, read_profile
from shardwise.step.spans import Kind, Timeline, TimelineBuilder
from tests.command import PATIENCE_S
from tests.observe.synthetic import Plan, build
from tests.screens import assert_screen

HOSTILE = "<script>document.title='owned'</script>\"><img src=x onerror=alert(1)>&amp;"


class Seen(HTMLParser):
    """Elements with their attributes, and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)

    def count(self, tag: str) -> int:
        return sum(1 for name, _ in self.tags if name == tag)


def profiles(**settings: Any) -> tuple[StepProfile, StepProfile]:
    predicted = shardwise.estimate("llama-3-8b", "2x8xH100-SXM@400Gbps", "zero3", **settings)
    assert predicted.time is not None
    measured = predicted._replace(
        provenance=Provenance("measured", "0.1.0", "a test"),
        time=TimeProfile(step_s=1.1 * predicted.time.step_s),
    )
    return predicted, measured


def write_pair(path: Path, name: str, **settings: Any) -> dict[str, Any]:
    predicted, measured = profiles(**settings)
    pair = {"name": name, "predicted": predicted.to_dict(), "measured": measured.to_dict()}
    path.write_text(json.dumps(pair))
    return pair


def page_of(*paths: Path) -> str:
    return write_page(read_subjects(paths), "shardwise report")


def test_a_profile_reads_back_as_it_was_written() -> None:
    for profile in profiles(recompute="full"):
        told = profile.to_dict()
        assert read_profile(told, "x").to_dict() == told
        # A later version may say more.
        assert read_profile({**told, "new": 1, "time": {**told["time"], "new_s": 2}}, "x")


def test_text_from_files_stays_text(tmp_path: Path) -> None:
    pair = write_pair(tmp_path / "run.json", HOSTILE)
    for side in ("predicted", "measured"):
        pair[side]["model"]["name"] = HOSTILE
        pair[side]["cluster"]["name"] = HOSTILE
        pair[side]["strategy"]["kind"] = HOSTILE
        pair[side]["traffic"][0]["op"] = HOSTILE
        pair[side]["memory"]["peak_phase"] = HOSTILE
        pair[side]["memory"]["terms"][HOSTILE] = 5
        pair[side]["memory"]["peak_allocated_bytes"] += 5
    (tmp_path / "run.json").write_text(json.dumps(pair))
    seen = Seen(page_of(tmp_path / "run.json"))
    assert seen.count("img") == 0
    assert seen.count("script") == 1  # ours; with no timeline there is no data
    assert HOSTILE in "".join(seen.text)
    assert not any(name.startswith("on") for _, attributes in seen.tags for name in attributes)


def test_the_time_of_a_run_is_told_once(tmp_path: Path) -> None:
    pair = write_pair(tmp_path / "run.json", "it")
    del pair["predicted"]["time"], pair["predicted"]["throughput"]
    (tmp_path / "run.json").write_text(json.dumps(pair))
    found = headline(read_subjects([tmp_path / "run.json"]))
    assert sum("tep took" in sentence for sentence in (found.statement, *found.evidence)) == 1


@pytest.mark.parametrize(("strategy", "differs"), [("zero3", True), (None, False)])
def test_a_plan_says_that_the_figures_below_are_of_the_run(
    tmp_path: Path, strategy: str | None, differs: bool
) -> None:
    asked: dict[str, Any] = {"model": "llama-3-8b", "cluster": "8xH100-SXM", "global_batch": 2**17}
    _, best = plan_run(**asked)
    assert best is not None
    run = describe_run(**asked, strategy=strategy or best.strategy)
    (tmp_path / "mine.toml").write_text(write_run(run))
    (subject,) = read_subjects([tmp_path / "mine.toml"])
    found = headline([subject])
    assert ("below are of mine" in found.evidence[-1]) == differs
    time = shardwise.estimate(run=run).time
    assert time is not None
    assert show_seconds(time.step_s) in str(figure_tiles(subject))


def test_attributes_are_escaped() -> None:
    (tag,) = Seen(element("a", "x", title='"><b>', class_="y", hidden=True, id=None)).tags
    assert tag == ("a", {"title": '"><b>', "class": "y", "hidden": None})


def test_the_page_asks_nobody_for_anything(tmp_path: Path) -> None:
    shardwise_toml = tmp_path / "run.toml"
    shardwise_toml.write_text('model = "llama-3-8b"\ncluster = "2x8xH100-SXM@400Gbps"\n')
    page = page_of(shardwise_toml)
    seen = Seen(page)
    addresses = [
        value
        for _, attributes in seen.tags
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "action", "data")
    ]
    assert addresses
    assert all(value and value.startswith(("#", "data:,")) for value in addresses)
    assert "url(" not in page
    assert "@import" not in page
    # Every section that the navigation names is there.
    names = {attributes.get("id") for tag, attributes in seen.tags}
    assert {value[1:] for value in addresses if value and value[0] == "#"} <= names


def test_a_plan_says_what_to_run_and_why(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "llama-3-8b"\ncluster = "2x8xH100-SXM@400Gbps"\n')
    text = " ".join(Seen(page_of(file)).text)
    best = shardwise.plan("llama-3-8b", "2x8xH100-SXM@400Gbps")
    assert best.winner is not None
    assert layout_words(best.winner.strategy) in text
    for heading in ("Plan", "Memory", "Time", "Timeline", "FSDP units", "What if"):
        assert heading in text
    assert best.why
    reasons = (*best.why, *best.limits_why)
    assert all(reason.words(best.units.blocks) in text for reason in reasons)


def test_several_on_one_cluster_are_ranked(tmp_path: Path) -> None:
    for number, micro_batch in enumerate((1, 2)):
        write_pair(tmp_path / f"{number}.json", f"batch {micro_batch}", micro_batch=micro_batch)
    text = " ".join(Seen(page_of(tmp_path)).text)
    rates = []
    for micro_batch in (1, 2):
        predicted, _ = profiles(micro_batch=micro_batch)
        assert predicted.throughput is not None
        rates.append(predicted.throughput.tokens_per_s)
    # The headline begins with the fastest.
    assert headline(read_subjects([tmp_path])).statement.startswith(
        f"batch {1 if rates[0] > rates[1] else 2} "
    )
    # Measured is 10 % more than predicted: 1 / 1.1 - 1.
    assert f"{1 / 1.1 - 1:+.1%}" in text


def test_models_are_not_ranked_against_each_other(tmp_path: Path) -> None:
    write_pair(tmp_path / "0.json", "one")
    other = write_pair(tmp_path / "1.json", "other")
    for side in ("predicted", "measured"):
        other[side]["model"]["name"] = "another"
    (tmp_path / "1.json").write_text(json.dumps(other))
    said = headline(read_subjects([tmp_path]))
    assert said.tone == "plain"
    assert "one" not in said.statement


BROKEN = {
    "empty.json": b"",
    "nan.json": b'{"schema": NaN}',
    "list.json": b"[]",
    "number.json": b"5",
    "other.json": b'{"a": 1}',
    "schema.json": b'{"schema": 9, "provenance": {}}',
    "time.json": b'{"schema": 1, "provenance": {"kind": "guessed"}}',
    "deep.json": b"[" * 100_000,
    "run.toml": b"model = 1\n",
    "text.txt": b"hello",
    "trace.json.gz": b"no gzip",
}


def test_broken_input_gets_a_sentence_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told: list[str] = []
    for name, content in BROKEN.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SpecError) as caught:
            read_subjects([Path(name)])
        (problem,) = caught.value.problems[:1]
        assert name in problem or name == "run.toml"  # of which the key is named
        told.append(problem)
    (tmp_path / "nothing").mkdir()
    for path in ("nowhere", "nothing"):
        with pytest.raises(SpecError) as caught:
            read_subjects([Path(path)])
        told += caught.value.problems
    assert_screen("report-broken", "\n".join(told))


# ---- the timeline ---------------------------------------------------------------------------


def inflated(text: str, rows: int) -> np.ndarray[Any, Any]:
    raw = zlib.decompress(base64.b64decode(text))
    return np.frombuffer(raw, dtype="<i4").reshape(rows, -1).astype(np.int64)


def scattered(count: int, seed: int = 0) -> Timeline:
    """Spans one after the other on three lanes, of random lengths with random gaps."""
    random = np.random.default_rng(seed)
    builder = TimelineBuilder()
    kinds: dict[str, Kind] = {"a": "compute", "b": "communication", "c": "copy"}
    for lane, kind in kinds.items():
        edges = np.cumsum(random.integers(1, 10_000, size=2 * count)) / 1e9
        for number in range(count):
            builder.add(lane, edges[2 * number], edges[2 * number + 1], kind, f"k{number % 7}")
    return builder.build()


def test_packed_spans_are_the_spans() -> None:
    timeline = scattered(500)
    told = steps_json([Step("rank 0", "measured", timeline, timeline.window[1])])
    (step,) = told["steps"]
    lane, start, length, kind, name = inflated(step["columns"], 5)
    begin = np.cumsum(start)
    assert told["tick_ns"] == 1
    order = np.lexsort((timeline.start_ns, timeline.lane))
    np.testing.assert_array_equal(begin + told["begin_ns"], timeline.start_ns[order])
    np.testing.assert_array_equal(length, (timeline.end_ns - timeline.start_ns)[order])
    np.testing.assert_array_equal(kind, timeline.kind[order])
    np.testing.assert_array_equal(lane, timeline.lane[order])
    assert [told["names"][code] for code in name] == [
        timeline.names[code] for code in timeline.name[order]
    ]


def test_long_steps_keep_their_shape() -> None:
    """Days of nanoseconds do not fit 32 bits: the clock gets coarser, shares stay."""
    timeline = scattered(50)
    stretched = Timeline(
        lane=timeline.lane,
        start_ns=timeline.start_ns * 10**9,
        end_ns=timeline.end_ns * 10**9,
        kind=timeline.kind,
        name=timeline.name,
        unit=timeline.unit,
        bytes=timeline.bytes,
        lanes=timeline.lanes,
        names=timeline.names,
        units=timeline.units,
    )
    told = steps_json([Step("x", "simulated", stretched, 1)])
    _, _, length, _, _ = inflated(told["steps"][0]["columns"], 5)
    whole = (timeline.end_ns - timeline.start_ns).sum() * 10**9
    assert length.sum() * told["tick_ns"] == pytest.approx(whole, rel=1e-6)


def test_thinned_spans_cover_about_the_same() -> None:
    timeline = scattered(30_000)
    few = thin_out(timeline, 20_000)
    assert len(few) <= 20_000
    assert thin_out(timeline, 10**9).start_ns.tolist() != []
    before, after = breakdown(timeline), breakdown(few)
    assert after.window_ns == before.window_ns
    # Gaps between what was joined are filled, so it covers more, up to all of its lane.
    assert after.compute_ns >= before.compute_ns


def test_traces_become_lanes(tmp_path: Path) -> None:
    made = build(tmp_path, Plan(ranks=2, blocks=4, steps=3))
    page = write_page(read_subjects(made.paths), "x")
    data = re.search(r'<script type="application/json" id="timeline-data">(.*?)</script>', page)
    assert data is not None
    told = json.loads(data[1])
    assert [step["name"] for step in told["steps"]] == ["rank 0", "rank 1"]
    kinds = ("compute", "communication")
    in_a_step = [s for s in made.spans if s.rank == 0 and s.kind in kinds]
    assert told["steps"][0]["spans"] == len(in_a_step) / 3


def test_a_page_keeps_the_table_that_blames_a_rank(tmp_path: Path) -> None:
    made = build(tmp_path, Plan(ranks=4, blocks=4, late={2: ("host", 30_000)}))
    (subject,) = read_subjects(made.paths)
    page = write_page([subject], "x")
    assert subject.traced is not None
    (late,) = [one for one in subject.traced.verdicts if isinstance(one, Straggler)]
    (ranks,) = re.findall(r'<section[^>]*id="ranks".*?</section>', page, re.DOTALL)
    rows = re.findall(r'<tr><th scope="row">(\d+)</th>(.*?)</tr>', ranks)
    cells = {f"rank {rank}": re.findall("<td>(.*?)</td>", row) for rank, row in rows}
    assert len(cells) == 4
    assert late.ranks == ("rank 2",)
    *_, idle, _, last = cells["rank 2"]
    assert idle.startswith(f"{late.spent_ns / 1e6:.1f}")
    assert int(last) == late.last_to_arrive
    assert all(int(row[-1]) == 0 for name, row in cells.items() if name != "rank 2")


@pytest.mark.nightly
def test_a_browser_finds_nothing_wrong(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no browser here")
    made = build(tmp_path, Plan(ranks=2, blocks=4, steps=2))
    for number in range(2):
        # Two, so that the name reaches headings, bars, tables and the timeline.
        write_pair(tmp_path / f"{number}.json", f"{HOSTILE}{number}", micro_batch=number + 1)
    file = tmp_path / "report.html"
    paths = [tmp_path / "0.json", tmp_path / "1.json", *made.paths]
    file.write_text(write_page(read_subjects(paths), HOSTILE))
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
         f"--user-data-dir={tmp_path / 'browser'}", "--virtual-time-budget=5000",
         "--enable-logging=stderr", "--dump-dom", file.as_uri()],
        capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title is not None
    shown = title[1].replace("document.title=&#x27;owned&#x27;", "")
    assert "owned" not in shown.replace("document.title='owned'", "")
    # The script has drawn: a canvas for the clock and one for each rank.
    assert done.stdout.count("<canvas") >= 3
    assert "Point at a span" in done.stdout


def test_a_folder_of_traces_may_hold_what_was_found_in_them(tmp_path: Path) -> None:
    build(tmp_path, Plan(ranks=2, blocks=2, steps=1))
    (tmp_path / "summary.json").write_text('{"schema": 1, "ranks": []}')
    (subject,) = read_subjects([tmp_path])
    assert subject.traced is not None
    assert len(subject.traced.summary.ranks) == 2


def test_cutting_takes_memory_along() -> None:
    builder = TimelineBuilder()
    builder.add("a", 0.0, 10e-9, "compute", "x")
    builder.add("a", 10e-9, 30e-9, "compute", "y")
    timeline = replace(
        builder.build(),
        memory_ns=np.asarray([5, 15, 25]),
        memory_bytes=np.asarray([1, 2, 3]),
    )
    cut = timeline.cut((12, 20))
    assert (cut.start_ns.tolist(), cut.end_ns.tolist()) == ([0], [8])
    assert (cut.memory_ns.tolist(), cut.memory_bytes.tolist()) == ([3], [2])
    assert timeline.cut((12, 20), begin=2).start_ns.tolist() == [10]


@pytest.mark.timing
def test_many_ranks_make_a_small_page_soon() -> None:
    """Seconds of the CPU: others share the machine."""
    found = measure(ranks=64, spans=1000)
    assert found["page_s"] <= 10
    assert 500_000 < found["page_bytes"] <= 6_000_000


def test_a_run_of_experts_shows_how_evenly_tokens_are_routed(tmp_path: Path) -> None:
    run = describe_run("gpt2", "2xH100-SXM", "ddp")
    logged = [
        {"step": step, "loss": 2.0, "expert_load": 1.25, "rank_load": 1.125, "routing_entropy": 0.5}
        for step in (10, 20, 30)
    ]
    for name, lines in (("mixture", logged), ("dense", [{"step": 10, "loss": 2.0}])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.toml").write_text(write_run(run.resolved()))
        (tmp_path / name / "prediction.json").write_text(
            json.dumps(shardwise.estimate(run=run).to_dict())
        )
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (subject,) = read_subjects([tmp_path / "mixture"])
    assert subject.routing["rank_load"] == [(10, 1.125), (20, 1.125), (30, 1.125)]
    text = " ".join(Seen(page_of(tmp_path / "mixture")).text)
    assert "busiest rank of an expert group" in text
    assert "entropy of routing" in text
    assert "busiest" not in " ".join(Seen(page_of(tmp_path / "dense")).text)
