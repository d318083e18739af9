"""The planner in Chromium, from a plain file server, with every other address out of reach."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planner.browser import (
    ASK,
    CHROMIUM,
    OPEN_DETAILS,
    OPTIONS,
    PATIENCE_MS,
    START,
    VIOLATIONS,
    Watched,
    file_server,
)
from shardwise.spec import catalogue
from shardwise.spec.huggingface import to_config
from tests.command import shardwise
from tests.hub import Shared, serving_hub
from tests.web.browser import axe_script, built_planner
from tests.web.test_serve import serving

pytestmark = pytest.mark.nightly
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

HOSTILE = '"><img src=x onerror="document.title=1"><script>document.title=1</script>'


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, downloads: Path) -> Path:
    return built_planner(tmp_path_factory.mktemp("planner"), downloads)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield started
        started.close()


@pytest.fixture
def watched(browser: Any, folder: Path) -> Iterator[Watched]:
    with file_server(folder) as address:
        context = browser.new_context()
        found = Watched(context, address)
        yield found
        context.close()
    assert found.said == []
    assert found.outside == []


def test_a_stranger_gets_from_a_question_to_a_command(watched: Watched) -> None:
    watched.open()
    page = watched.page
    page.fill("#model", "llama-3-70b")
    page.fill("#nodes", "4")
    page.locator("#about", has_text="llama-3-70b").wait_for(timeout=60_000)
    page.locator("#about", has_text="4x8xH100-SXM@400Gbps").wait_for(timeout=60_000)
    words = ["--model", "llama-3-70b", "--cluster", "4x8xH100-SXM@400Gbps"]
    printed = shardwise("plan", *words, "--json")
    page.get_by_role("tab", name="JSON").click()
    assert page.inner_text("#run pre").strip() == printed.stdout.strip()
    page.select_option("#export-to", "axolotl")
    page.locator("#run pre", has_text="fsdp_version").wait_for(timeout=60_000)
    # The address holds the question.
    again = Watched(page.context, watched.address)
    again.page.goto(page.url)
    again.page.locator("#about", has_text="llama-3-70b").wait_for(timeout=60_000)


@pytest.mark.parametrize(
    ("model", "cluster"),
    [
        # Blocks with more parameters than 32 bits count: integers of a browser are that small.
        ("qwen3-235b-a22b", "2x4xRTX-5090@400Gbps"),
        ("shape-310b", "64x8xH100-SXM@400Gbps"),
        # Where the last bit of a power would differ between math libraries.
        ("gpt2", "4x4xGB300@50Gbps"),
        # Machines of a provider, by name.
        ("llama-3-8b", "2xa3-megagpu-8g"),
    ],
)
def test_its_numbers_are_those_of_the_command_line(
    watched: Watched, model: str, cluster: str
) -> None:
    watched.page.goto(watched.address)
    watched.page.evaluate(START)
    asked = {"ask": "plan", "model": model, "cluster": cluster}
    found = json.loads(watched.page.evaluate(ASK, asked))
    printed = shardwise("plan", "--model", model, "--cluster", cluster, "--json")
    assert found["json"].strip() == printed.stdout.strip()


def test_an_instance_sets_device_and_network(watched: Watched) -> None:
    watched.open("#nodes=2")
    page = watched.page
    page.select_option("#instance", "a3-megagpu-8g")
    page.locator("#about", has_text="2x8xH100-SXM@200Gbps").wait_for(timeout=60_000)
    assert page.locator("#device").is_disabled()


def test_a_layout_and_a_slider_tell_what_changed(watched: Watched) -> None:
    watched.open("#nodes=4")
    page = watched.page
    page.locator("button.layout").nth(1).click()
    page.locator("#changed .changes").wait_for(timeout=60_000)
    assert page.locator("button.layout").nth(1).get_attribute("aria-pressed") == "true"
    before = page.inner_text("#verdict")
    page.focus("#slider-network")
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    page.locator("#about", has_text="@50Gbps").wait_for(timeout=60_000)
    watched.answered()
    assert page.inner_text("#verdict") != before
    page.locator("#curves-section").scroll_into_view_if_needed()
    page.locator("#curves svg").nth(2).wait_for(timeout=120_000)


def opened_again(page: Any, browser: Any, address: str) -> Any:
    """A page of another browser, at the link that this page copies."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy link to this plan").click()
    page.get_by_role("button", name="Copied").wait_for(timeout=60_000)
    again = Watched(browser.new_context(), address)
    again.page.goto(page.evaluate("() => navigator.clipboard.readText()"))
    return again.page


def test_a_link_holds_the_layout_and_the_sliders(watched: Watched, browser: Any) -> None:
    watched.open("#model=llama-3-8b&nodes=2")
    page = watched.page
    page.focus("#slider-network")
    page.keyboard.press("ArrowLeft")
    page.locator("#about", has_text="@200Gbps").wait_for(timeout=60_000)
    watched.answered()
    page.locator("button.layout").nth(2).click()
    page.locator("#run-section:not([inert])").wait_for(timeout=60_000)
    shown = page.inner_text("#about"), page.inner_text("#verdict")
    assert page.locator("#why h2").inner_text() != ""
    again = opened_again(page, browser, watched.address)
    again.locator("#about", has_text=shown[0]).wait_for(timeout=PATIENCE_MS)
    assert again.inner_text("#verdict") == shown[1]
    assert again.locator("button.layout").nth(2).get_attribute("aria-pressed") == "true"
    assert again.locator("#slider-network + output").inner_text() == "200 Gbps instead of 400"
    again.get_by_role("button", name="Back to the cluster asked for").click()
    again.locator("#about", has_text="@400Gbps").wait_for(timeout=60_000)
    again.context.close()


@contextmanager
def native(browser: Any, width: int = 1440) -> Iterator[Watched]:
    """The page of `shardwise serve`, answered."""
    with serving() as server:
        context = browser.new_context(viewport={"width": width, "height": 1000})
        watched = Watched(context, f"http://127.0.0.1:{server.port}/")
        watched.open(f"#token={server.token}&nodes=4")
        yield watched
        assert server.token not in watched.page.url
        context.close()


# Of models whose config.json a page does not get, what a sentence about it says.
NOT_GIVEN = {
    "acme/gated": "licence",
    "acme/missing": "no model",
    "acme/Small-1B@v3": "no revision v3",
    "acme/weights": "no config.json",
    "acme/huge": "too large",
    "acme/endless": "too large",
    "acme/text": "JSON",
    "acme/list": "JSON",
    "acme/deep": "JSON",
    "acme/kind": "red",
}


def hub_models() -> dict[str, Shared]:
    """Models of a hub, of which only the first can be planned."""
    config = to_config(catalogue.model("llama-3.2-1b"))
    known = json.dumps(config).encode()
    return {
        "acme/Small-1B": Shared({"main": known}),
        "acme/gated": Shared({"main": known}, gated=True),
        "acme/weights": Shared({"main": b""}),
        "acme/huge": Shared({"main": known}, told=2**40, endless=True),
        "acme/endless": Shared({"main": b" " * 2**16}, told=None, endless=True),
        "acme/text": Shared({"main": b"<html>log in</html>"}),
        "acme/list": Shared({"main": b"[1]"}),
        "acme/deep": Shared({"main": b'{"a": ' * 20_000}),
        "acme/kind": Shared({"main": b'{"model_type": "<b>red</b>"}'}),
    }


def test_a_model_is_looked_up_on_the_hub_by_the_browser(browser: Any) -> None:
    with serving_hub(hub_models()) as hub, serving(HF_ENDPOINT=hub.address) as server:
        context = browser.new_context()
        watched = Watched(context, f"http://127.0.0.1:{server.port}/")
        page = watched.page
        page.unroute("**/*")
        # A preset of that name is not looked up.
        watched.open(f"#token={server.token}&model=Qwen/Qwen3-8B&nodes=4")
        page.locator("#about", has_text="qwen3-8b").wait_for(timeout=60_000)
        assert hub.asked == []
        page.fill("#model", "acme/Small-1B")
        page.locator("#about", has_text="Small-1B").wait_for(timeout=60_000)
        watched.answered()
        page.get_by_role("tab", name="command").click()
        assert "--model acme/Small-1B " in page.inner_text("#run pre")
        for name, told in NOT_GIVEN.items():
            page.fill("#model", name)
            page.locator("#problems", has_text=told).wait_for(timeout=60_000)
            page.fill("#model", "acme/Small-1B")
            page.wait_for_function("() => document.querySelector('#problems').innerText === ''")
        assert page.locator("#problems b").count() == 0
        # What was fetched once is kept.
        files = [asked.path for asked in hub.asked if "Small-1B" in asked.path]
        assert len([path for path in files if "resolve/main" in path]) == 1
        assert {asked.token for asked in hub.asked} == {""}
        # Another host is out of reach of the page.
        hub.models["acme/elsewhere"] = Shared({"main": b"{}"}, elsewhere="http://localhost:9")
        page.fill("#model", "acme/elsewhere")
        page.locator("#problems", has_text="cannot be looked up").wait_for(timeout=60_000)
        context.close()


def test_a_server_offers_no_link_to_itself(browser: Any) -> None:
    """Nobody else could open it, and it held the token."""
    with native(browser) as watched:
        page = watched.page
        assert page.get_by_role("button", name="Copy file").is_visible()
        assert not page.get_by_text("Copy link to this plan").is_visible()


def test_sliders_are_seen_at_once_and_another_job_is_no_change(browser: Any) -> None:
    with native(browser) as watched:
        page = watched.page
        assert page.locator("#whatif-section").bounding_box()["y"] < 1000
        page.fill("#model", "gpt2")
        page.locator("#about", has_text="gpt2").wait_for(timeout=60_000)
        watched.answered()
        assert not page.locator("#changed-section").is_visible()


LABELS = """() => [...document.querySelectorAll("#timeline-piece .lane")].map((label) =>
  label.getBoundingClientRect().top
    - label.closest(".row").querySelector("canvas").getBoundingClientRect().top)"""
CLIPPED = """() => [...document.querySelectorAll("#layouts *, .lane, .of")].filter((one) =>
  one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).overflowX !== "visible").length"""


@pytest.mark.parametrize("width", [1440, 390])
def test_labels_stand_at_their_lanes_and_no_column_is_cut(browser: Any, width: int) -> None:
    with native(browser, width) as watched:
        page = watched.page
        page.fill("#model", "llama-3-70b")
        page.fill("#nodes", "64")
        page.locator("#about", has_text="64x8xH100").wait_for(timeout=60_000)
        watched.answered()
        # A head of 21 px, then lanes of 16, as the script draws them.
        tops = page.evaluate(LABELS)
        assert tops == [21 + 16 * lane for lane in range(len(tops))]
        assert tops
        assert page.evaluate(CLIPPED) == 0


def test_a_configuration_of_ones_own_is_priced_beside_the_best(browser: Any) -> None:
    with native(browser) as watched:
        page = watched.page
        page.locator("#own summary").click()
        page.select_option("#strategy", "zero2")
        page.fill("#micro-batch", "2")
        page.select_option("#recompute", "full")
        page.locator("#about", has_text="full recompute").wait_for(timeout=60_000)
        watched.answered()
        assert page.locator("#changed .changes").is_visible()
        page.get_by_role("tab", name="JSON").click()
        shown = json.loads(page.inner_text("#run pre"))
        words = ["--model", "llama-3-8b", "--cluster", "4x8xH100-SXM@400Gbps"]
        words += ["--strategy", "zero2", "--micro-batch", "2", "--recompute", "full"]
        printed = json.loads(shardwise("estimate", *words, "--json").stdout)
        assert shown["memory"] == printed["memory"]
        assert shown["time"] == printed["time"]


def test_an_option_of_a_tip_sets_its_field_and_is_planned_with(browser: Any) -> None:
    with native(browser) as watched:
        page = watched.page
        page.locator("#why button.option", has_text="--compile").click()
        page.locator("#about", has_text="torch.compile").wait_for(timeout=60_000)
        watched.answered()
        assert page.input_value("#compile") == "yes"
        page.get_by_role("tab", name="command").click()
        assert "--compile" in page.inner_text("#run pre")


def test_an_earlier_answer_cannot_be_copied(watched: Watched) -> None:
    watched.open()
    page = watched.page
    assert page.locator("#run-section[inert]").count() == 0
    page.fill("#model", "llama-3-8x")
    assert page.locator("#run-section[inert]").count() == 1
    page.locator("#problems p").wait_for(timeout=60_000)
    assert page.locator("#run-section[inert]").count() == 1
    page.fill("#model", "llama-3-8b")
    page.locator("#run-section:not([inert])").wait_for(timeout=60_000)
    assert page.locator("#problems p").count() == 0


def test_it_works_without_a_network_once_loaded(watched: Watched) -> None:
    watched.open()
    page = watched.page
    page.evaluate("async () => { await navigator.serviceWorker.ready; }")
    page.unroute("**/*")
    page.context.set_offline(True)
    page.reload()
    watched.answered()
    assert "Recommended" in page.inner_text("#verdict")
    page.context.set_offline(False)


def test_a_failure_is_told_and_later_questions_are_answered(
    browser: Any, folder: Path, tmp_path: Path
) -> None:
    failing = Path(shutil.copytree(folder, tmp_path / "failing"))
    worker = failing / "worker.js"
    own = "from shardwise.web.answer import answer"
    # Python fails on one model, and all of its runtime on another.
    faults = r"""
from shardwise.web.answer import answer as right
def answer(text):
    if '"gpt2-xl"' in text:
        raise OverflowError("too large")
    return right(text)
"""
    script = worker.read_text().replace(f'"{own}"', f"`{faults}`")
    fatal = 'if (question.includes("\\"gpt2-large\\"")) throw new RangeError("stack");'
    script = script.replace(
        "try { postMessage({ id, answer", f"try {{ {fatal} postMessage({{ id, answer"
    )
    worker.write_text(script)
    with file_server(failing) as address:
        context = browser.new_context()
        watched = Watched(context, address)
        for model, kind in (("gpt2-xl", "OverflowError"), ("gpt2-large", "RangeError")):
            watched.page.goto("about:blank")
            watched.page.goto(f"{address}#model={model}")
            watched.page.locator("#problems", has_text=kind).wait_for(timeout=120_000)
            watched.page.fill("#model", "gpt2")
            right = re.compile(r"\bgpt2\b(?!-)")
            watched.page.locator("#about", has_text=right).wait_for(timeout=120_000)
            gone = "() => document.querySelector('#problems').innerText === ''"
            watched.page.wait_for_function(gone, timeout=120_000)
        context.close()
    assert watched.said == []


# The version that the page was built with, and the one that its script was.
VERSIONS = "() => [document.body.dataset.version, window.version]"
KEPT = """async (version) => {
  for (let n = 0; n < 1200; n++) {
    const { installing, waiting, active } = await navigator.serviceWorker.ready;
    const controls = navigator.serviceWorker.controller && active.state === "activated";
    const settled = controls && !installing && !waiting;
    const names = await caches.keys();
    if (settled && names.length === 1 && names[0].endsWith(version)) return;
    await new Promise((done) => setTimeout(done, 50));
  }
  throw new Error("not kept");
}"""


@contextmanager
def caching_server(folder: Path, kept: str) -> Iterator[str]:
    """A file server that tells browsers how long to keep its files."""

    class Handler(SimpleHTTPRequestHandler):
        def end_headers(self) -> None:
            self.send_header("Cache-Control", kept)
            super().end_headers()

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()


def _versioned(folder: Path, version: str) -> None:
    """Write a version into the page, its script and the worker's package, as a build would."""
    page, script, package = (
        folder / name for name in ("index.html", "planner.js", "packages.json")
    )
    page.write_text(page.read_text().replace("<body", f'<body data-version="{version}"'))
    script.write_text(script.read_text() + f'\nwindow.version = "{version}";\n')
    package.write_text(package.read_text() + " " * int(version))
    listed = json.loads((folder / "files.json").read_text())
    for one in listed["files"]:
        data = (folder / one["url"]).read_bytes()
        one |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    old, new = listed["version"], version * 16
    (folder / "files.json").write_text(json.dumps({**listed, "version": new}))
    offline = folder / "offline.js"
    offline.write_text(offline.read_text().replace(old, new))
    for one in folder.iterdir():
        os.utime(one, (10**9, 10**9 + int(version)))  # a server tells versions apart by seconds


@pytest.mark.parametrize("kept", ["no-cache", "max-age=3600"])
def test_a_new_version_is_used_as_a_whole(
    browser: Any, folder: Path, tmp_path: Path, kept: str
) -> None:
    site = tmp_path / "site"
    for version in ("1", "2"):
        shutil.copytree(folder, tmp_path / version)
        _versioned(tmp_path / version, version)
    site.symlink_to(tmp_path / "1")
    with caching_server(site, kept) as address:
        context = browser.new_context()
        watched = Watched(context, address)
        page = watched.page
        page.unroute("**/*")  # it would keep the browser's own cache out
        watched.open()
        page.evaluate(KEPT, "1" * 16)
        site.unlink()
        site.symlink_to(tmp_path / "2")
        for offline in (False, False, True):
            context.set_offline(offline)
            page.reload()
            page.locator("#verdict .verdict").wait_for(timeout=120_000)
            assert page.evaluate(VERSIONS) == ["2", "2"]
            page.evaluate(KEPT, "2" * 16)
        context.close()
    assert watched.said == []


@pytest.mark.parametrize(
    "question",
    [
        f"#model={HOSTILE}",
        "#config=" + json.dumps({"model_type": HOSTILE}),
        f"#layout={HOSTILE}&if-network={HOSTILE}",
        f"#device={HOSTILE}&nodes={HOSTILE}&seq-len={HOSTILE}",
    ],
)
def test_hostile_text_stays_text(watched: Watched, question: str) -> None:
    watched.page.goto(f"{watched.address}{question}")
    watched.page.locator("#problems p").first.wait_for(timeout=60_000)
    assert watched.page.title() == "Planner · Shardwise"
    assert watched.page.locator("#answer img, #answer script[src]").count() == 0


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (1024, "dark"), (390, "light")])
def test_everyone_can_use_it(watched: Watched, downloads: Path, width: int, scheme: str) -> None:
    page = watched.page
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    watched.open("#nodes=4&tokens=1T&price=2")
    page.evaluate(OPEN_DETAILS)
    page.evaluate(axe_script(downloads))
    assert page.evaluate(VIOLATIONS) == []
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


def test_two_builds_are_equal(folder: Path, tmp_path: Path, downloads: Path) -> None:
    again = built_planner(tmp_path / "again", downloads)
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert names == sorted(p.relative_to(again) for p in again.rglob("*") if p.is_file())
    for name in names:
        assert (folder / name).read_bytes() == (again / name).read_bytes()
