"""What a further axis of parallelism takes: a toy axis, added to a copy of a few files in memory.

Blocks all-gather their output along it. Prediction, traffic, JSON, simulation, comparison and the
analysis of traces read it without being changed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise

# By file of the package: texts, each of which occurs once, and what adding the axis makes of them.
EDITS = {
    # The table of axes: its name.
    "spec/mesh.py": {
        'InnerAxis = Literal["tensor", "context", "expert"]':
        'InnerAxis = Literal["tensor", "context", "expert", "toy"]',
        'INNER_AXES: tuple[InnerAxis, ...] = ("tensor", "context", "expert")':
        'INNER_AXES: tuple[InnerAxis, ...] = ("tensor", "context", "expert", "toy")',
        'OWN_GROUPS = ("context", "expert", "expert_shard")':
        'OWN_GROUPS = ("context", "expert", "expert_shard", "toy")',
    },
    # Its degree as a setting, and its stride: a view of those that share the states.
    "spec/strategy.py": {
        "    expert: PositiveInt = 1\n": "    expert: PositiveInt = 1\n    toy: PositiveInt = 1\n",
        'if axis == "expert":': 'if axis in ("expert", "toy"):',
    },
    # Its column.
    "predict/configurations.py": {
        "    expert: Ints\n": "    expert: Ints\n    toy: Ints\n",
        '        "expert": _ints([s.expert for s in strategies]),\n':
        '        "expert": _ints([s.expert for s in strategies]),\n'
        '        "toy": _ints([s.toy for s in strategies]),\n',
        '            "expert": (self.expert, self.shard_stride),\n':
        '            "expert": (self.expert, self.shard_stride),\n'
        '            "toy": (self.toy, self.shard_stride),\n',
    },
    # Its collective: 512 bytes of each token, once in the forward of each block.
    "units/load.py": {
        "    units = _with_attention(units, strategy)\n":
        "    units = _with_attention(units, strategy)\n"
        "    if strategy.toy > 1:\n"
        "        from shardwise.units.division import Exchange, Exchanges\n"
        '        inside = Exchanges(forward=(Exchange("toy", "all-gather", 512.0),))\n'
        "        block = units.blocks[0]\n"
        "        block = replace(block, stage=replace(block.stage, exchanges=inside))\n"
        "        units = replace(units, blocks=(block,) * len(units.blocks))\n",
    },
}  # fmt: skip
MOST_FILES = 8

READ = """
import importlib.util, json, sys
from importlib.machinery import SourceFileLoader
from importlib.abc import MetaPathFinder

package, edits = sys.argv[1], json.loads(sys.argv[2])

class Edited(SourceFileLoader):
    def get_code(self, name):
        return compile(edits[self.path], self.path, "exec")

class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        file = f"{package}/{name.removeprefix('shardwise.').replace('.', '/')}.py"
        if file not in edits:
            return None
        return importlib.util.spec_from_file_location(name, file, loader=Edited(name, file))

sys.meta_path.insert(0, Finder())

from shardwise.observe.rank.axes import axis_of_group, operation_along_axis
from shardwise.predict.api import estimate_run, replay_run
from shardwise.spec.question import describe_run
from shardwise.step.profile import by_operation, read_profile
from shardwise.step.words import collective_names

def gathers(run):
    timeline = replay_run(run)
    return int((timeline.lane == timeline.lanes.index("all-gather")).sum())

names = "llama-3-8b", "2x8xH100-SXM@400Gbps"
run = describe_run(*names, "zero3", toy=4)
profile = estimate_run(run)
written = profile.to_dict()
print(json.dumps({
    "traffic": [list(one) for one in profile.traffic if one.group == "toy"],
    "toy_s": written["time"]["toy_s"],
    "again": read_profile(written, "here").time.inside_s["toy"],
    "names": list(collective_names(by_operation(profile.traffic)).values()),
    "tokens": run.job.seq_len * run.strategy.micro_batch,
    "gathers": [gathers(one) for one in (run, describe_run(*names, "zero3"))],
    "trace": operation_along_axis("all-gather", axis_of_group("mesh_toy")),
}))
"""


@pytest.fixture(scope="module")
def toy() -> dict[str, object]:
    """What an interpreter reads of a run along the toy axis."""
    package = Path(shardwise.__file__).parent
    edits = {}
    for name, changes in EDITS.items():
        text = (package / name).read_text(encoding="utf-8")
        for old, new in changes.items():
            assert text.count(old) == 1, f"{name} has no longer one {old!r}"
            text = text.replace(old, new)
        edits[str(package / name)] = text
    command = [sys.executable, "-c", READ, str(package), json.dumps(edits)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_an_axis_takes_few_files() -> None:
    assert len(EDITS) <= MOST_FILES


def test_its_collectives_are_traffic_of_every_block(toy: dict[str, object]) -> None:
    blocks, tokens = 32, toy["tokens"]
    assert isinstance(tokens, int)
    assert toy["traffic"] == [["all_gather", "toy", 4, blocks, 512 * tokens * blocks]]


def test_its_time_is_told_apart_and_read_again(toy: dict[str, object]) -> None:
    assert isinstance(toy["toy_s"], float)
    assert toy["toy_s"] > 0
    assert toy["again"] == toy["toy_s"]


def test_the_simulated_step_shows_it(toy: dict[str, object]) -> None:
    gathers = toy["gathers"]
    assert isinstance(gathers, list)
    assert gathers[0] - gathers[1] == 32


def test_screens_and_traces_name_it(toy: dict[str, object]) -> None:
    names = toy["names"]
    assert isinstance(names, list)
    assert "all-gather, toy 4" in names
    assert toy["trace"] == "toy all-gather"
