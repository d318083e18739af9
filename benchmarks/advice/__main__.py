"""Ask the planner what an expert would ask, and judge its answers.

    python -m benchmarks.advice [--json] [--only a01,a02] [--part 0/4]

Questions and what is accepted are in questions.toml. Printed: answers that are accepted, those that
are refused where an answer is wanted, those that are not accepted with the reason, laughable
ones, and answers whose records contradict their own table. Exits with 1 if any is laughable or
contradicts itself.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.advice.judge import Accept, Answer, contradictions, laughable, misses

FOLDER = Path(__file__).parent
REFUSED = 2


class Question(NamedTuple):
    """A command, and what an expert accepts of its answer."""

    name: str
    ask: str
    why: str
    accept: Accept
    # Makes the file that the command reads.
    run: str | None = None


class Judged(NamedTuple):
    """A question, the exit code of its answer, and what is wrong with it."""

    name: str
    exit: int
    misses: tuple[str, ...]
    laughable: tuple[str, ...]
    contradictions: tuple[str, ...]

    @property
    def accepted(self) -> bool:
        return not (self.misses or self.laughable or self.contradictions)


def read_questions() -> list[Question]:
    """All questions, in the order of the file."""
    table = tomllib.loads((FOLDER / "questions.toml").read_text(encoding="utf-8"))
    return [_question(entry) for entry in table["question"]]


def _question(entry: dict[str, Any]) -> Question:
    given = entry.pop("accept", {})
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    return Question(accept=Accept(**fields), **entry)


def judge(question: Question) -> Judged:
    """Ask one question in this process, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        if question.run is not None:
            _run(question.run, folder)
        code, printed = _run(question.ask, folder)
    answer: Answer | None = None
    if question.ask.startswith("plan ") and code != REFUSED:
        answer = json.loads(printed)
    return Judged(
        question.name,
        code,
        tuple(misses(question.accept, code, answer)),
        tuple(laughable(answer)) if answer else (),
        tuple(contradictions(answer)) if answer else (),
    )


def _run(command: str, folder: str) -> tuple[int, str]:
    """The exit code of a command and what it printed."""
    from shardwise.cli.main import run

    words = [_path(word, folder) for word in shlex.split(command)]
    json_too = ["--json"] if words[0] == "plan" and "-o" not in words else []
    out, err = io.StringIO(), io.StringIO()
    argv, sys.argv = sys.argv, ["shardwise", *words, *json_too]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            run()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.argv = argv
    return code, out.getvalue()


def _path(word: str, folder: str) -> str:
    if word.startswith("cfg/"):
        return str(FOLDER / "models" / word.removeprefix("cfg/"))
    return word.replace("RUN/", f"{folder}/")


def summary(judged: list[Judged]) -> dict[str, int]:
    """How many answers are of which kind; a refusal where an answer is wanted counts alone."""
    refused = [one for one in judged if one.exit == REFUSED and not one.accepted]
    return {
        "questions": len(judged),
        "accepted": sum(one.accepted for one in judged),
        "refused": len(refused),
        "not accepted": sum(not one.accepted for one in judged) - len(refused),
        "laughable": sum(bool(one.laughable) for one in judged),
        "contradictions": sum(bool(one.contradictions) for one in judged),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="names of questions, by commas")
    parser.add_argument("--part", default="0/1", help="every n-th question from the i-th: i/n")
    options = parser.parse_args()
    os.environ.setdefault("COLUMNS", "80")
    first, step = (int(number) for number in options.part.split("/"))
    names = set(filter(None, options.only.split(",")))
    questions = [q for q in read_questions() if not names or q.name in names][first::step]
    judged = []
    for question in questions:
        judged.append(judge(question))
        one = judged[-1]
        wrong = (*one.laughable, *one.contradictions, *one.misses)
        print(f"{one.name}: {'; '.join(wrong) or 'accepted'}", file=sys.stderr, flush=True)
    figures = summary(judged)
    if options.json:
        print(json.dumps({**figures, "judged": [one._asdict() for one in judged]}, indent=2))
    else:
        print("\n".join(f"{name}: {count}" for name, count in figures.items()))
    raise SystemExit(1 if figures["laughable"] or figures["contradictions"] else 0)


if __name__ == "__main__":
    main()
