"""The built site: every link leads somewhere, nothing is loaded from elsewhere, llms.txt is whole.

Building takes long, so the gate leaves it to the workflow of the documentation and to nightly.
"""

from __future__ import annotations

import html.parser
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from benchmarks.planner.browser import CHROMIUM, OPTIONS
from shardwise.web.site import page_files
from tests.extras import write_site
from tests.test_docs import BLOCK, DOCS, ROOT, SITE

pytest.importorskip("material")
pytest.importorskip("mkdocstrings")
pytestmark = pytest.mark.nightly


class Page(html.parser.HTMLParser):
    """Links and anchors of a page, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value or "")
            if name in ("href", "src"):
                (self.links if tag == "a" else self.loaded).add(value or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with nothing but what `pip install .[docs]` installs."""
    folder, only = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("only-docs")
    write_site(only, "docs")
    paths = os.pathsep.join([str(only), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = ["mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # The planner's page, which is built apart; what it downloads is not needed here.
    (folder / "planner").mkdir()
    for name, data in page_files("browser", docs="../").items():
        (folder / "planner" / name).write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def built(site: Path) -> dict[Path, Page]:
    # The page for addresses that do not exist may be shown under any of them.
    return {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_link_of_the_site_leads_somewhere(site: Path, built: dict[Path, Page]) -> None:
    broken = []
    for path, page in built.items():
        for link in page.links | page.loaded:
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            target = (path.parent / unquote(address.path)).resolve() if address.path else path
            target = target / "index.html" if target.is_dir() else target
            # Behind the planner's address stands a question.
            anchor = "" if "=" in address.fragment else unquote(address.fragment)
            if not target.is_file() or (
                anchor and target in built and anchor not in built[target].anchors
            ):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken


def test_pages_load_nothing_from_elsewhere(built: dict[Path, Page]) -> None:
    elsewhere = {link for page in built.values() for link in page.loaded if urlsplit(link).netloc}
    assert not elsewhere


# Of a card: what ends beyond it, and what is wider than the box it stands in.
OVERFLOWS = """() => [...document.querySelectorAll(".gallery section")].flatMap((card) =>
  [...card.querySelectorAll("*")].filter((one) =>
    one.getBoundingClientRect().right > card.getBoundingClientRect().right + 1
    || (one.clientWidth > 0 && one.scrollWidth > one.clientWidth + 1
      && !one.matches(".bars, .limit")))
  .map((one) => `${one.tagName} ${one.className}: ${one.textContent.slice(0, 40)}`))"""

NARROWEST = """() => Math.min(...[...document.querySelectorAll(".gallery .of")].map((one) =>
  one.clientWidth))"""


def test_cards_of_the_gallery_hold_what_is_in_them(site: Path) -> None:
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with driver.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        for width in (390, 768, 1024, 1440, 1920):
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.goto((site / "gallery" / "index.html").as_uri())
            assert page.locator(".gallery section").count() == 8
            assert page.evaluate(OVERFLOWS) == [], width
            # A name that has no room is one letter wide.
            assert page.evaluate(NARROWEST) > 60
            assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        browser.close()


@pytest.mark.usefixtures("make")
def test_the_reference_has_an_anchor_for_every_command(built: dict[Path, Page]) -> None:
    from make.commands import written

    reference = next(one for path, one in built.items() if path.parent.name == "cli")
    assert {f"shardwise-{name}" for name, _ in written()} <= reference.anchors


# ---- llms.txt -------------------------------------------------------------------------------

LISTED = re.compile(r"- \[([^\]]+)\]\(([^)\s]+)\): (\S.*)")


def test_llms_txt_has_the_form_of_llmstxt_org(site: Path) -> None:
    """A title, a summary, and then nothing but headings and lists of links with a line each."""
    title, summary, *rest = (site / "llms.txt").read_text().strip().split("\n\n")
    assert re.fullmatch(r"# .+", title)
    assert re.fullmatch(r"> .+", summary)
    for heading, lines in zip(rest[::2], rest[1::2], strict=True):
        assert re.fullmatch(r"## .+", heading)
        assert all(LISTED.fullmatch(line) for line in lines.split("\n")), lines


def test_llms_txt_lists_every_page_and_every_schema(site: Path) -> None:
    links = [found[2] for found in LISTED.finditer((site / "llms.txt").read_text())]
    pages = [page.relative_to(DOCS).as_posix() for page in SITE]
    schemas = [path.relative_to(site).as_posix() for path in site.rglob("*.schema.json")]
    assert len(schemas) >= 4
    assert sorted(links) == sorted([*pages, *schemas])
    assert all((site / link).is_file() for link in links)


@pytest.mark.usefixtures("make")
def test_pages_as_markdown_say_what_the_site_says(site: Path) -> None:
    from hooks import MARK

    for page in SITE:
        path = site / page.relative_to(DOCS)
        text = BLOCK.sub("", path.read_text())
        assert not MARK.search(text), path
        assert not re.search(r"^:::", text, re.MULTILINE), path
        for link in re.findall(r"\]\(([^)\s#]+)[^)]*\)", text):
            if not urlsplit(link).scheme:
                assert (path.parent / unquote(link)).exists(), f"{path}: {link}"
    assert "| `seq_len` |" in (site / "reference" / "run-toml.md").read_text()
    assert "### estimate" in (site / "reference" / "python.md").read_text()


@pytest.mark.usefixtures("make")
def test_links_are_absolute_where_the_site_has_an_address(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hooks
    from mkdocs.config import load_config

    assert "$id" not in json.loads((site / "reference" / "run.schema.json").read_text())
    monkeypatch.setenv("SITE_URL", "https://docs.example/shardwise/")
    config = hooks.on_config(load_config(str(ROOT / "mkdocs.yml")))
    made = hooks.downloads(config)
    schema = "https://docs.example/shardwise/reference/run.schema.json"
    assert json.loads(made["reference/run.schema.json"])["$id"] == schema
    links = [found[2] for found in LISTED.finditer(made["llms.txt"])]
    assert schema in links
    assert all(link.startswith("https://docs.example/shardwise/") for link in links)
