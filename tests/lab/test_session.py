"""Real training on the hosts of a lab, one job after another in the same processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lab import network
from benchmarks.lab.baseline import write_run_toml
from benchmarks.lab.network import hosts, set_rate
from benchmarks.lab.session import Session, SessionError

REASON = network.available()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

MODEL = {"layers": 2, "hidden": 256, "heads": 4, "ffn": 512, "vocab": 512}
# Of every parameter in fp32: embedding, head, and two blocks with their norms.
PARAMETERS_BYTES = 4 * (2 * 512 * 256 + 256 + 2 * (4 * 256**2 + 3 * 256 * 512 + 2 * 256))


def test_a_session_trains_what_it_is_given_at_the_rate_that_is_set(tmp_path: Path) -> None:
    def toml(strategy: dict[str, object], steps: int) -> Path:
        train = {"steps": steps, "measure": True}
        return write_run_toml(tmp_path / "run.toml", strategy, 2, 1, None, train, MODEL, 32)

    with (
        hosts(2, None, "session") as made,
        Session(made, 1, tmp_path / "session") as session,
    ):
        fast = session.run(toml({"kind": "ddp"}, 9), tmp_path / "fast")
        assert fast.ok, fast.error
        wrong = session.run(toml({"kind": "zero3", "shard": 3}, 9), tmp_path / "wrong")
        assert not wrong.ok
        assert "shard 3" in wrong.error
        set_rate(made, 250e6)
        slow = session.run(toml({"kind": "zero3"}, 9), tmp_path / "slow")
        assert slow.ok, slow.error
        with pytest.raises(SessionError, match="no answer"):
            session.run(toml({"kind": "ddp"}, 100_000), tmp_path / "long", timeout_s=0.5)

    for outcome in (fast, slow):
        assert outcome.measured is not None
        assert outcome.predicted is not None
        assert outcome.measured["cluster"]["nodes"] == 2
        assert len(outcome.step_s) == 4
    # Half of what is gathered twice and of what is reduced passes each link.
    least_s = 3 * PARAMETERS_BYTES / 2 * 8 / 250e6
    assert min(slow.step_s) > 0.9 * least_s
    assert min(fast.step_s) < least_s
