"""Wrong words on the command line: one plain sentence, exit code 2, for every command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import shardwise
from tests.screens import assert_screen

WRONG: dict[str, list[str]] = {
    "a price below zero": ["plan", "--model", "gpt2", "--cluster", "H100-SXM", "--price", "-1"],
    "a number that is none": ["plan", "--top", "x"],
    "too few processes": ["train", "run.toml", "--nproc", "0"],
    "an option that is unknown": ["estimate", "--modle", "gpt2"],
    "an option without its value": ["whatif", "--model"],
    "a command that is unknown": ["plna"],
    "a missing argument": ["export"],
    "a missing option": ["export", "run.toml"],
    "one argument too many": ["catalog", "devices", "H100-SXM", "x"],
    "a word that is no choice": ["plan", "--objective", "luck"],
    "a number out of range": ["estimate", "--model", "gpt2", "--cluster", "8xH100-SXM",
                              "--prefetch", "9", "--recompute", "1.5"],
    "more blocks than there are": ["estimate", "--model", "llama-3-8b", "--cluster", "8xH100-SXM",
                                   "--blocks-per-unit", "100"],
    "a device that is not precise": ["plan", "--model", "gpt2", "--cluster", "8xA100"],
}  # fmt: skip


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    folder: Path = tmp_path_factory.mktemp("usage")
    ran = {name: shardwise(*words, folder=folder) for name, words in WRONG.items()}
    return {name: (done.returncode, done.stdout, done.stderr) for name, done in ran.items()}


@pytest.mark.parametrize("name", WRONG)
def test_it_is_one_sentence_for_each_problem_and_exit_code_2(
    name: str, printed: dict[str, tuple[int, str, str]]
) -> None:
    code, out, err = printed[name]
    assert code == 2
    assert out == ""
    lines = err.splitlines()
    assert lines
    assert all(line.startswith("error: ") for line in lines)
    assert not set("╭│╰─") & set(err)


def test_screen(printed: dict[str, tuple[int, str, str]]) -> None:
    assert_screen("usage", "".join(f"$ {name}\n{printed[name][2]}" for name in WRONG))
