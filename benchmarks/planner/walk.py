"""Walk from a question to a command, with nothing but a browser, and photograph each step.

`python -m benchmarks.planner.walk FOLDER OUTPUT`: FOLDER is what `docs/make/planner.py` writes with
`--numpy`. Keys are pressed as fast as people type, and each answer is read for some seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

from benchmarks.planner.browser import CHROMIUM, OPTIONS, Watched, file_server

KEY_MS, READING_S = 200, 8


def walk(watched: Watched, output: Path) -> list[tuple[str, float]]:
    """Each step, and the second at which it was done."""
    page, begin, done = watched.page, time.monotonic(), []

    def step(what: str, reading_s: float = 0.0) -> None:
        done.append((what, round(time.monotonic() - begin, 1)))
        page.screenshot(path=output / f"{len(done)}.png")
        time.sleep(reading_s)

    watched.open()
    step("first answer", READING_S)
    page.focus("#model")
    page.keyboard.press("Control+a")
    page.keyboard.type("qwen2.5-32b", delay=KEY_MS)
    page.select_option("#adapter", "qlora")
    page.select_option("#device", "A100-80GB")
    page.focus("#per-node")
    page.keyboard.press("Control+a")
    page.keyboard.type("4", delay=KEY_MS)
    page.locator("#about", has_text="1x4xA100-80GB").wait_for(timeout=60_000)
    watched.answered()
    step("plan of the question", READING_S)
    page.locator("button.layout").nth(1).click()
    page.locator("#changed .changes").wait_for(timeout=60_000)
    step("another layout", READING_S)
    page.locator("#run-section").scroll_into_view_if_needed()
    page.select_option("#export-to", "trl")
    page.locator("#run .start", has_text="trl sft").wait_for(timeout=60_000)
    page.locator("#run-section").scroll_into_view_if_needed()
    step("files and command for TRL")
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    with file_server(given.folder) as address, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        watched = Watched(browser.new_context(viewport={"width": 1280, "height": 900}), address)
        steps = walk(watched, given.output)
        browser.close()
    told = {"steps": steps, "console": watched.said, "outside": watched.outside}
    sys.stdout.write(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
