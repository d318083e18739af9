"""Photograph the planner in ten states, at three widths, light and dark, and let axe judge each.

`python -m benchmarks.planner.states FOLDER AXE OUTPUT`: FOLDER is what `docs/make/planner.py`
writes with `--numpy`, AXE is `axe.min.js` of npm's axe-core.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from playwright.sync_api import sync_playwright

from benchmarks.planner.browser import CHROMIUM, OPTIONS, VIOLATIONS, Watched, file_server

WIDTHS, SCHEMES = (1440, 1024, 390), ("light", "dark")
CONFIG = {"model_type": "llama", "hidden_size": 3072, "num_hidden_layers": 28,
          "num_attention_heads": 24, "num_key_value_heads": 8, "intermediate_size": 8192,
          "vocab_size": 128256, "max_position_embeddings": 131072}  # fmt: skip
# What to do in a state once its answer is there.
Act = Callable[[Watched], None]


def nothing(_: Watched) -> None:
    return


def other_layout(watched: Watched) -> None:
    watched.page.locator("button.layout").nth(1).click()
    watched.page.locator("#changed .changes").wait_for(timeout=60_000)


def slower_network(watched: Watched) -> None:
    page = watched.page
    page.locator("#curves-section").scroll_into_view_if_needed()
    page.locator("#curves svg").nth(2).wait_for(timeout=120_000)
    page.focus("#slider-network")
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    page.locator("#about", has_text="@50Gbps").wait_for(timeout=60_000)
    watched.answered()


def export(watched: Watched) -> None:
    watched.page.select_option("#export-to", "axolotl")
    watched.page.locator("#run pre", has_text="fsdp_version").wait_for(timeout=60_000)


STATES: dict[str, tuple[str, Act]] = {
    "one-node": ("", nothing),
    "cluster": ("#model=llama-3-70b&nodes=64", nothing),
    "other-layout": ("#nodes=4", other_layout),
    "what-if": ("#nodes=4", slower_network),
    "qlora": ("#model=llama-3-70b&adapter=qlora&device=A100-80GB&per-node=4", nothing),
    "config": (f"#config={quote(json.dumps(CONFIG, indent=2))}", nothing),
    "budget": ("#nodes=64&tokens=1T&price=2.50&deadline=30", nothing),
    "export": ("#nodes=2", export),
    "does-not-fit": ("#model=llama-3-70b&device=RTX-4090&per-node=1", nothing),
    "refused": ("#model=llama-3-80b", nothing),
}


def photograph(watched: Watched, name: str, axe: str, output: Path) -> list[str]:
    """Write a picture for each width and scheme; return what axe found."""
    page: Any = watched.page
    found = []
    page.evaluate(axe)
    for width in WIDTHS:
        for scheme in SCHEMES:
            page.set_viewport_size({"width": width, "height": 1000})
            page.emulate_media(color_scheme=scheme)
            page.wait_for_timeout(400)
            page.screenshot(path=output / f"{name}-{width}-{scheme}.png", full_page=True)
            where = f"{name} at {width} px, {scheme}"
            found += [f"{where}: {one}" for one in page.evaluate(VIOLATIONS)]
            if page.evaluate("() => document.documentElement.scrollWidth > innerWidth"):
                found.append(f"{where}: wider than the window")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("axe", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", choices=STATES)
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    axe = given.axe.read_text(encoding="utf-8")
    found, pictures = [], 0
    with file_server(given.folder) as address, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        for name, (question, act) in STATES.items():
            if given.only not in (None, name):
                continue
            context = browser.new_context()
            watched = Watched(context, address)
            watched.open(question)
            act(watched)
            found += photograph(watched, name, axe, given.output)
            found += [f"{name}: {one}" for one in (*watched.said, *watched.outside)]
            pictures += len(WIDTHS) * len(SCHEMES)
            context.close()
        browser.close()
    sys.stdout.write(json.dumps({"pictures": pictures, "found": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
