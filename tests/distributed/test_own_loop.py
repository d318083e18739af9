"""examples/own_loop.py on two real processes: data, saving, being killed, resuming."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.command import PATIENCE_S, ROOT, environment
from tests.distributed.launch import launcher

torch = pytest.importorskip("torch")

RANKS, STEPS, ACCUMULATE, MICRO_BATCH, SEQUENCES = 2, 40, 2, 8, 256
SCRIPT = str(ROOT / "examples" / "own_loop.py")


def run(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        [*launcher(RANKS), "--module", "tests.distributed.own_loop_run", SCRIPT],
        cwd=folder, env=environment(OMP_NUM_THREADS="1", **variables),
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip


def sequences(folder: Path) -> list[list[list[int]]]:
    """By rank and micro-batch, the sequences that were trained on."""
    return [json.loads((folder / f"sequences-{r}.json").read_text()) for r in range(RANKS)]


def final_state(folder: Path) -> dict[str, object]:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder / "checkpoints" / f"step-{STEPS}", folder / "state.pt")
    loaded: dict[str, object] = torch.load(folder / "state.pt")
    return loaded


def assert_same_bits(one: object, other: object) -> int:
    """Compare nested states; return how many tensors there are."""
    if isinstance(one, dict):
        assert isinstance(other, dict)
        assert one.keys() == other.keys()
        return sum(assert_same_bits(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
        return 1
    assert one == other
    return 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    done = run(folder)
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [float(line.split()[3].rstrip(",")) for line in done.stdout.splitlines()
              if line.startswith("step")]  # fmt: skip
    assert len(losses) == 4
    assert losses[-1] < 0.1 < losses[0]
    return folder


def test_ranks_train_on_different_data(whole: Path) -> None:
    """In every epoch each sequence is seen once, by one rank."""
    per_epoch = SEQUENCES // RANKS // MICRO_BATCH
    for epoch in range(STEPS * ACCUMULATE // per_epoch):
        part = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
        seen = [token for rank in sequences(whole) for batch in rank[part] for token in batch]
        assert sorted(seen) == list(range(SEQUENCES))


@pytest.mark.nightly
def test_killed_after_a_save_it_resumes_to_the_same_bits(whole: Path, tmp_path: Path) -> None:
    killed = run(tmp_path, DIE_AFTER_SAVES="2")
    assert killed.returncode != 0
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-10", "step-20"]
    # A save that was interrupted has no .metadata, and must not be taken for the last one.
    (tmp_path / "checkpoints" / "step-25").mkdir()
    resumed = run(tmp_path)
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    assert sequences(tmp_path) == [rank[20 * ACCUMULATE :] for rank in sequences(whole)]
    # Weights, two moments and a step count of every parameter.
    assert assert_same_bits(final_state(whole), final_state(tmp_path)) > 100
