"""How Shardwise speaks: the words of the field, short sentences, no typing errors.

Covers README, documentation pages, the golden files of screens and all text in the source.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import readability

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (ROOT / "docs", ROOT / "examples" / "skills")
PAGES = [ROOT / "README.md", *(page for one in FOLDERS for page in sorted(one.rglob("*.md")))]
SCREENS = sorted((ROOT / "tests" / "golden").rglob("*.txt"))
SOURCES = sorted((ROOT / "src").rglob("*.py"))

# Phrases a reader has to decode, and what to write instead.
REPLACED = {
    r"sequences of \d": "sequence length 4,096",
    r"no recomputation\b": "no recompute",
    r"safe to use|safely give": "usable",
    r"the allocator's pools": "allocator overhead",
    r"must be shared": "must be sharded",
    r"lie nearer|can tell apart|indistinguishable": "too close to call",
    r"To take less memory": "Lower-memory options",
    r"[Nn]othing fits": "No configuration fits",
    r"The nearest is": "Closest: …",
    r"keep the others waiting": "Stragglers: …",
    r"To change:": "Suggested fix:",
    r"Nobody is late": "No single rank is consistently late",
    r"has nothing queued": "is idle (nothing queued by the host)",
    r"does not go on": "has made no progress",
    r"[Gg]oes on from": "Resuming from",
    r"made again": "replayed",
    r"[Pp]assed over": "Skipped corrupt checkpoint",
    r"[Ss]topped when asked": "Stopped by SIGINT after step …",
    r"cannot be meant": "Invalid input",
    r"is whole and is what was saved": "Verify a checkpoint's integrity",
    r"lies in fragments": "fragmentation",
    r"learn from every probe": "Benchmark the most promising configurations",
    r"in any currency": "Price per GPU-hour",
    r"last word has": "The parser decides",
    r"cannot save again": "Savings overlap; do not add them",
    r"walks? downhill": "Imports are layered",
    r"race of (the )?streams": "stream schedule simulation",
    r"(?<![\d.])(\d+%) to \1(?!\d)": "one figure instead of a range with equal ends",
    r"(?<![\d.])-0(\.0+)?(?![\d.])\s*(%|points)": "no negative zero",
}
LONGEST_SENTENCE, HIGHEST_GRADE = 45, 9.0


def line_of(text: str, at: int) -> str:
    return text[text.rfind("\n", 0, at) + 1 : text.find("\n", at)].strip()


@pytest.mark.parametrize("phrase", REPLACED)
def test_a_phrase_that_was_replaced_stays_replaced(phrase: str) -> None:
    found = []
    for path in (*PAGES, *SCREENS, *SOURCES):
        text = path.read_text(encoding="utf-8")
        # A phrase may be broken over lines, in a page or in a literal.
        found += [
            f"{path.relative_to(ROOT)}: {line_of(text, match.start())}"
            for match in re.finditer(phrase.replace(" ", r"\s+"), text)
        ]
    assert not found, f"write: {REPLACED[phrase]}"


def sentences(page: str) -> list[str]:
    """The prose of a page: no code, tables, headings, links' targets."""
    text = re.sub(r"^( *)```.*?^\1```[ ]*$", "", page, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\A---.*?^---", "", text, flags=re.DOTALL | re.MULTILINE)
    kept = [line for line in text.splitlines() if not re.match(r"\s*(\||#|!|<|>)", line)]
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", "\n".join(kept))
    text = re.sub(r"`[^`]*`", "code", text)
    # List items and paragraphs end a sentence too.
    text = re.sub(r"^\s*([-*]|\d+\.)\s", "\n\n", text, flags=re.MULTILINE)
    parts = re.split(r"(?<=[.!?:])\s+|\n\n+", text.replace("*", ""))
    words = [re.findall(r"[A-Za-z0-9'-]+", part) for part in parts]
    return [" ".join(one) for one in words if len(one) > 2]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_reads_easily(page: Path) -> None:
    """Flesch-Kincaid grade 9: about what a fourteen-year-old native speaker reads."""
    prose = sentences(page.read_text(encoding="utf-8"))
    longest = max(prose, key=lambda sentence: len(sentence.split()), default="")
    assert len(longest.split()) <= LONGEST_SENTENCE, longest
    if sum(len(sentence.split()) for sentence in prose) >= 60:
        grades = readability.getmeasures("\n".join(prose), lang="en")["readability grades"]
        assert grades["Kincaid"] <= HIGHEST_GRADE


def test_nothing_is_misspelled() -> None:
    names = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs", "src", "examples"]
    done = subprocess.run(
        [sys.executable, "-m", "codespell_lib", "--skip", "*.svg,*.png", *names],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
