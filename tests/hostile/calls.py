"""The table of hostile calls: words of a command, and the file that they name as FILE, if any."""

from __future__ import annotations

from typing import NamedTuple

from tests.hostile.files import KINDS

SECRET = ("SHARDWISE_RDZV_SECRET", "a" * 40)
# Seconds after which a command that serves is asked to end. Others end by themselves.
SERVES_S = 6.0


class Call(NamedTuple):
    words: tuple[str, ...]
    kind: str | None = None
    # Of FILE; a name may be hostile too.
    name: str = "file"
    # More variables of the environment; a value may be FILE.
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        return ascii(f"{' '.join(self.words)[:60]} {self.kind or ''}")

    @property
    def serves(self) -> bool:
        return self.words[0] in ("serve", "rendezvous")


# Commands that read a file, and the ending that they expect.
READERS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("estimate", "FILE"), ".toml"),
    (("plan", "FILE"), ".toml"),
    (("whatif", "FILE", "--vary", "gpus=8,16"), ".toml"),
    (("export", "FILE", "--to", "slurm"), ".toml"),
    (("import", "FILE"), ".yaml"),
    (("import", "FILE"), ".py"),
    (("trace", "FILE"), ".json.gz"),
    (("memory", "FILE"), ".pickle"),
    (("fsck", "FILE"), ""),
    (("runs", "FILE"), ""),
    (("contribute", "FILE"), ".json"),
    (("trace", "FILE", "--against", "FILE"), ".json.gz"),
    (("report", "FILE"), ".json"),
    (("report", "FILE"), ".toml"),
    (("train", "FILE", "--nproc", "2", "--steps", "1"), ".toml"),
    (("doctor", "FILE"), ".toml"),
    (("train", "FILE", "--profile", "1", "--nproc", "2"), ".toml"),
    (("compare", "FILE", "--nproc", "2", "--rounds", "1", "--steps", "8"), ".toml"),
    (("tune", "FILE", "--nproc", "2", "--top", "1", "--steps", "8"), ".toml"),
    (("calibrate", "--from-run", "FILE"), ""),
    (("export-weights", "FILE", "-o", "out"), ""),
    (("serve", "FILE"), ""),
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
    ("serve", "--port"),
    # What follows is refused before anything is measured.
    ("calibrate", "--network", "nan", "--device"),
    ("calibrate", "--device", "V100", "--network"),
    ("doctor", "--only"),
    ("doctor", "--skip"),
    ("doctor", "--only", "memory", "--deadline", "1", "--device"),
)
# Of commands that take a run: FILE is one, for GPUs that are not there.
OPTIONS_OF_RUNS: tuple[tuple[str, ...], ...] = (
    ("whatif", "FILE", "--vary"),
    ("train", "FILE", "--name"),
    ("train", "FILE", "--nnodes"),
    ("train", "FILE", "--steps"),
    ("train", "FILE", "--profile", "1", "--name"),
    ("compare", "FILE", "--strategies"),
    ("tune", "FILE", "--strategies"),
    ("tune", "FILE", "--batches"),
    ("export-weights", "FILE", "-o", "out", "--shard-size"),
    ("trace", "FILE", "--against", "FILE", "--top"),
    ("report", "FILE", "-o"),
    ("examples",),
    ("calibrate", "--from-run", "FILE", "-o"),
)
NAMES = ("a\nb.json", "\x1b[2J.json", "\u202etxt.json", "=1+1.json", "-rf", "a" * 250)

CALLS = (
    *(Call(words, kind, f"file{ending}") for kind in KINDS for words, ending in READERS),
    *(Call(("rendezvous", "127.0.0.1:0"), kind, variables=((f"{SECRET[0]}_FILE", "FILE"),))
      for kind in KINDS),
    *(Call((*words, value)) for words in OPTIONS for value in VALUES),
    *(Call((*words, value), "run", "file.toml") for words in OPTIONS_OF_RUNS for value in VALUES),
    *(Call(("rendezvous", value), variables=(SECRET,)) for value in VALUES),
    *(Call(("train", "FILE", "--nnodes", "2"), "run", "file.toml", (SECRET, ("PET_RDZV_ID", value)))
      for value in VALUES),
    *(Call((*words[:1], "FILE"), "trace names", name) for words, _ in READERS for name in NAMES
      if words[1] == "FILE"),
)  # fmt: skip
# A few for every change: one of each command, and one of each kind of harm.
SAMPLE = tuple(
    call
    for call in CALLS
    if call.name.startswith("file")
    and (call.words[0], call.kind)
    in {
        ("memory", "pickle code"), ("memory", "pickle memo"), ("trace", "gzip separators"),
        ("trace", "pipe"), ("import", "yaml code"), ("plan", "endless"), ("estimate", "digits"),
        ("import", "yaml laughs"), ("import", "python code"), ("runs", "escape"),
        ("contribute", "deep list"), ("fsck", "pipe"), ("export", "dotted"),
        ("train", "deep toml"), ("doctor", "pipe"), ("trace", "gzip cut"), ("report", "deep dict"),
        ("rendezvous", "pipe"),
    }
)  # fmt: skip
