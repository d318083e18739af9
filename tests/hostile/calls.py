"""The table of hostile calls: words of a command, and the file that they name as FILE, if any."""

from __future__ import annotations

from typing import NamedTuple

from tests.hostile.files import KINDS


class Call(NamedTuple):
    words: tuple[str, ...]
    kind: str | None = None
    # Of FILE; a name may be hostile too.
    name: str = "file"

    @property
    def label(self) -> str:
        return ascii(f"{' '.join(self.words)[:60]} {self.kind or ''}")


# Commands that read a file, and the ending that they expect.
READERS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("estimate", "FILE"), ".toml"),
    (("plan", "FILE"), ".toml"),
    (("export", "FILE", "--to", "slurm"), ".toml"),
    (("import", "FILE"), ".yaml"),
    (("import", "FILE"), ".py"),
    (("trace", "FILE"), ".json.gz"),
    (("memory", "FILE"), ".pickle"),
    (("fsck", "FILE"), ""),
    (("runs", "FILE"), ""),
    (("contribute", "FILE"), ".json"),
)
VALUES = ("nan", "inf", "-inf", "-1", "0", "1e30", "", " ", "\u202e1", "\x1b[2J", "9" * 5000,
          "../../x", "a\nb", "=cmd|' /C calc'!A0", "\U0001f600", "NaN;rm -rf /")  # fmt: skip
_PLAN = ("plan", "--model", "gpt2", "--cluster", "8xH100-SXM")
OPTIONS: tuple[tuple[str, ...], ...] = (
    ("plan", "--cluster", "8xH100-SXM", "--model"),
    ("plan", "--model", "gpt2", "--cluster"),
    (*_PLAN, "--seq-len"),
    (*_PLAN, "--global-batch"),
    (*_PLAN, "--optimizer"),
    ("estimate", "--model", "gpt2", "--cluster", "8xH100-SXM", "--strategy"),
    ("catalog",),
    ("runs", "--where"),
)
NAMES = ("a\nb.json", "\x1b[2J.json", "\u202etxt.json", "=1+1.json", "-rf", "a" * 250)

CALLS = (
    *(Call(words, kind, f"file{ending}") for kind in KINDS for words, ending in READERS),
    *(Call((*words, value)) for words in OPTIONS for value in VALUES),
    *(Call((*words[:1], "FILE"), "trace names", name) for words, _ in READERS for name in NAMES),
)
# A few for every change: one of each command, and one of each kind of harm.
SAMPLE = tuple(
    call
    for call in CALLS
    if (call.words[0], call.kind)
    in {
        ("memory", "pickle code"), ("memory", "pickle memo"), ("trace", "gzip separators"),
        ("trace", "pipe"), ("import", "yaml code"), ("plan", "endless"), ("estimate", "digits"),
        ("import", "yaml laughs"), ("import", "python code"), ("runs", "escape"),
        ("contribute", "deep list"), ("fsck", "pipe"), ("export", "dotted"),
    }
)  # fmt: skip
