"""Rewrite what commands print in README, documentation pages and the skill.

    python docs/make/outputs.py                  # commands that only plan, on all pages
    python docs/make/outputs.py README.md --all  # also those that train or measure

A `text` block right after an `sh` block shows what the last command of that block prints. Where
lines are left out (`…`), each passage keeps its number of lines and is found by its similarity to
what is printed now. Read the result: after a large change a passage may be the wrong one.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT / "docs", ROOT / "examples" / "skills")
PAGES = [ROOT / "README.md", *(page for one in FOLDERS for page in sorted(one.rglob("*.md")))]
PAIR = re.compile(
    r"^```sh\n((?:(?!```)[^\n]*\n)*)```\n\n```text\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
LEFT_OUT = "…"
PLANNING = ("plan", "estimate", "whatif", "catalog", "export", "import")


def shortened(shown: Sequence[str], printed: Sequence[str]) -> list[str]:
    """`printed` with the passages of `shown`, each where it is most similar; the rest left out."""
    if LEFT_OUT not in shown:
        return list(printed)
    written: list[str] = []
    begin = 0
    for passage in _passages(shown):
        start = _most_similar(passage, printed, begin)
        written += [LEFT_OUT] * (start > begin) + list(printed[start : start + len(passage)])
        begin = start + len(passage)
    return written + [LEFT_OUT] * (begin < len(printed))


def _passages(shown: Sequence[str]) -> list[list[str]]:
    """Runs of lines between marks."""
    groups = itertools.groupby(shown, key=lambda line: line == LEFT_OUT)
    return [list(lines) for left_out, lines in groups if not left_out]


def _most_similar(passage: Sequence[str], printed: Sequence[str], begin: int) -> int:
    """Where, from line `begin`, as many lines resemble a passage most."""
    text = "\n".join(passage)

    def similarity(start: int) -> float:
        candidate = "\n".join(printed[start : start + len(passage)])
        return difflib.SequenceMatcher(None, text, candidate, autojunk=False).ratio()

    starts = range(begin, max(begin, len(printed) - len(passage)) + 1)
    return max(starts, key=similarity)


def rewrite(page: Path, everything: bool) -> int:
    """Run the commands of a page and put in what they print; returns how many blocks changed."""
    text, changed = page.read_text(encoding="utf-8"), 0
    with tempfile.TemporaryDirectory() as folder:
        run = re.search(r"^```toml\n(.*?\[job\].*?)^```$", text, re.DOTALL | re.MULTILINE)
        run = run or re.search(
            r"^```toml\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
        )
        if run:
            (Path(folder) / "run.toml").write_text(run[1])
        shutil.copytree(ROOT / "examples", Path(folder) / "examples")

        def replaced(found: re.Match[str]) -> str:
            nonlocal changed
            lines = [x for x in found[1].replace("\\\n", " ").splitlines() if x.strip()]
            words = shlex.split(lines[-1], comments=True)
            if found[2].startswith("$ ") or words[0] != "shardwise":
                return found[0]
            if words[1] not in PLANNING and not everything:
                return found[0]
            printed = ""
            for line in lines:
                if not line.startswith("pip install"):
                    printed = _output(line, folder)
            lines_printed = [x.rstrip() for x in printed.strip("\n").splitlines()]
            new = "\n".join(shortened(found[2].splitlines(), lines_printed)) + "\n"
            changed += new != found[2]
            return found[0].replace(f"```text\n{found[2]}", f"```text\n{new}")

        page.write_text(PAIR.sub(replaced, text), encoding="utf-8")
    return changed


def _output(line: str, folder: str) -> str:
    function = f'shardwise() {{ {shlex.quote(sys.executable)} -m shardwise "$@"; }}'
    done = subprocess.run(
        ["bash", "-c", f"{function}\n{line}"],
        cwd=folder,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr if done.returncode == 2 else done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", type=Path, help="pages; all of them if none is named")
    parser.add_argument("--all", action="store_true", help="also commands that train or measure")
    options = parser.parse_args()
    for page in [path.resolve() for path in options.pages] or PAGES:
        changed = rewrite(page, options.all)
        sys.stdout.write(f"{page.relative_to(ROOT)}: {changed} blocks changed\n")


if __name__ == "__main__":
    main()
