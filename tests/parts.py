"""The parts of a nightly run, each an hour at most: `bash .ci/nightly PART`.

Every nightly test belongs to one part. What measures time runs alone, and what hypothesis draws
tries more examples at night; all else belongs to the part that names its file.
"""

from __future__ import annotations

import pytest

# The longest beginning of a path that matches decides.
FILES = {
    "timing": (),
    "pairs": (
        "tests/distributed/test_adapter.py",
        "tests/distributed/test_context.py",
        "tests/distributed/test_engine_agrees.py",
        "tests/distributed/test_eval.py",
        "tests/distributed/test_expert",
        "tests/distributed/test_frozen.py",
        "tests/distributed/test_loss.py",
        "tests/distributed/test_optimizers.py",
        "tests/distributed/test_pairwise",
        "tests/distributed/test_parity.py",
        "tests/distributed/test_split_root.py",
        "tests/distributed/test_tensor.py",
    ),
    "runs": (
        "tests/accept/",
        "tests/benchmarks/",
        "tests/calibrate/",
        "tests/checkpoint/",
        "tests/distributed/",
        "tests/engine/",
        "tests/fleet/",
        "tests/observe/",
        "tests/planning/",
        "tests/predict/",
        "tests/test_scale.py",
        "tests/step/",
        "tests/train/",
        "tests/units/",
    ),
    "hosts": (
        "tests/distributed/test_hosts.py",
        "tests/distributed/test_replica_hosts.py",
        "tests/distributed/test_torchrun_hosts.py",
        "tests/lab/",
        "tests/stacks/test_real_slurm.py",
        "tests/stacks/test_slurm.py",
        "tests/train/test_supervised_hosts.py",
    ),
    "stacks": (
        "tests/distributed/test_accelerate.py",
        "tests/distributed/test_export",
        "tests/distributed/test_integrations.py",
        "tests/distributed/test_lightning.py",
        "tests/distributed/test_peft.py",
        "tests/spec/",
        "tests/stacks/",
    ),
    "docs": (
        "tests/cli/",
        "tests/contribution/",
        "tests/report/",
        "tests/test_",
        "tests/walks/",
        "tests/web/",
    ),
    "random": ("tests/hostile/",),
}  # fmt: skip
PARTS = tuple(FILES)


def part_of(path: str, markers: set[str]) -> str | None:
    """The part that runs a test, given its file and markers; None where only the gate does."""
    if "timing" in markers:
        return "timing"
    if "hypothesis" in markers:
        return "random"
    if "nightly" not in markers:
        return None
    matching = {start: part for part, starts in FILES.items() for start in starts
                if path.startswith(start)}  # fmt: skip
    if not matching:
        raise pytest.UsageError(f"tests/parts.py: name the part of nightly that runs {path}")
    return matching[max(matching, key=len)]


def part_of_item(item: pytest.Item) -> str | None:
    markers = {marker.name for marker in item.iter_markers()}
    return part_of(item.nodeid.partition("::")[0], markers)


if __name__ == "__main__":
    print(*PARTS)
