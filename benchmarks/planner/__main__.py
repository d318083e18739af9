"""Measure the planner in headless Chromium, from a plain file server, without any other address.

`python -m benchmarks.planner FOLDER [--starts 5] [--questions 200] [--seed 0] [--json]`. FOLDER is
what `docs/make/planner.py` writes with `--numpy`. It needs playwright and Chromium.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from playwright.sync_api import sync_playwright

from benchmarks.planner.browser import ASK, CHROMIUM, OPTIONS, READY, START, Watched, file_server
from benchmarks.planner.questions import Asked, questions

LARGE = {"ask": "plan", "model": "llama-3-70b", "cluster": "64x8xH100-SXM@400Gbps"}


def cpu_s() -> float:
    """Processor seconds of the browser that this process started."""
    spent = 0.0
    for child in psutil.Process().children(recursive=True):
        try:
            if "chrom" in child.name():
                spent += sum(child.cpu_times()[:2])
        except psutil.NoSuchProcess:
            continue
    return spent


def started(watched: Watched) -> dict[str, float]:
    """A first visit: seconds of CPU from the address to ready, and to the first answer."""
    begin = cpu_s()
    watched.page.goto(watched.address)
    watched.page.evaluate(READY)
    ready = cpu_s() - begin
    watched.answered()
    return {"ready_cpu_s": ready, "first_answer_cpu_s": cpu_s() - begin}


def answer_costs(page: Any) -> dict[str, float]:
    """Seconds of CPU of a plan and of an estimate, each the median of several."""
    plans, estimates = [], []
    for _ in range(3):
        begin = cpu_s()
        planned = json.loads(page.evaluate(ASK, LARGE))
        plans.append(cpu_s() - begin)
    question = {**LARGE, "ask": "estimate", "strategy": planned["strategy"], "timeline": False}
    for gbps in (50, 100, 200, 300, 500, 600, 700, 800):
        begin = cpu_s()
        page.evaluate(ASK, {**question, "change": {"network": str(gbps)}})
        estimates.append(cpu_s() - begin)
    return {"plan_cpu_s": median(plans), "estimate_cpu_s": median(estimates)}


def visit(driver: Any, address: str) -> tuple[Any, Watched, dict[str, float]]:
    """A new browser on the page, with a planner for questions, and what its answers took."""
    browser = driver.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
    watched = Watched(browser.new_context(), address)
    told = started(watched)
    watched.page.evaluate(START)
    told |= answer_costs(watched.page)
    told["longest_blocked_ms"] = max(watched.page.evaluate("() => window.blocked"), default=0.0)
    return browser, watched, told


def printed(asked: Asked) -> tuple[int, str, list[str]]:
    """What the command line answers: its code, its JSON, and its problems."""
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", *asked.words],
        capture_output=True,
        text=True,
        check=False,
    )
    problems = [
        line.removeprefix("error: ")
        for line in done.stderr.splitlines()
        if line.startswith("error: ")
    ]
    return done.returncode, done.stdout, problems


def differences(page: Any, count: int, seed: int) -> list[dict[str, Any]]:
    """Questions that the browser answers otherwise than the command line."""
    asked = list(questions(count, seed))
    found = []
    with ThreadPoolExecutor(2) as pool:
        for one, (code, text, problems) in zip(asked, pool.map(printed, asked), strict=True):
            answer = json.loads(page.evaluate(ASK, one.question))
            same = (
                answer["exit_code"] == code
                and answer["problems"] == problems
                and answer.get("json", "").rstrip("\n") == text.rstrip("\n")
            )
            if not same:
                found.append({"words": one.words, "code": code, "browser": answer["exit_code"],
                              "problems": problems, "of_browser": answer["problems"]})  # fmt: skip
                sys.stderr.write(f"{found[-1]}\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.starts < 1:
        parser.error("--starts: give 1 or more")
    visits: list[dict[str, float]] = []
    outside: list[str] = []
    said: list[str] = []
    with file_server(given.folder) as address, sync_playwright() as driver:
        for number in range(given.starts):
            browser, watched, told = visit(driver, address)
            visits.append(told)
            if number == given.starts - 1:
                different = differences(watched.page, given.questions, given.seed)
            browser.close()
            outside += watched.outside
            said += watched.said
    figures: dict[str, Any] = {
        **{name: [round(one[name], 2) for one in visits] for name in visits[0]},
        "questions": given.questions,
        "different": len(different),
        "outside": outside,
        "console": said,
    }
    sys.stdout.write(json.dumps(figures, indent=2 if given.json else None) + "\n")


if __name__ == "__main__":
    main()
