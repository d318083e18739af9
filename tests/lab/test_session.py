"""Real training on the hosts of a lab, one job after another in the same processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lab import network
from benchmarks.lab.baseline import write_run_toml
from benchmarks.lab.network import hosts, link_bytes, set_rate
from benchmarks.lab.session import Session, SessionError

REASON = network.available()
pytestmark = [
    pytest.mark.timing,
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
]

MODEL = {"layers": 2, "hidden": 256, "heads": 4, "ffn": 512, "vocab": 512}
# Of every parameter in fp32: embedding, head, and two blocks with their norms.
PARAMETERS_BYTES = 4 * (2 * 512 * 256 + 256 + 2 * (4 * 256**2 + 3 * 256 * 512 + 2 * 256))


STEPS = 9
# Two steps measure, and timings leave out those up to the last of them.
TIMED = 4


def test_a_session_trains_what_it_is_given_at_the_rate_that_is_set(tmp_path: Path) -> None:
    def toml(strategy: dict[str, object], steps: int = STEPS) -> Path:
        train = {"steps": steps, "measure": True}
        return write_run_toml(tmp_path / "run.toml", strategy, 2, 2, None, train, MODEL, 32)

    with (
        hosts(2, None, "session") as made,
        Session(made, 2, tmp_path / "session") as session,
    ):
        before, _ = link_bytes(made[1])
        fast = session.run(toml({"kind": "hsdp"}), tmp_path / "fast")
        assert fast.ok, fast.error
        sent = link_bytes(made[1])[0] - before
        wrong = session.run(toml({"kind": "zero3", "shard": 3}), tmp_path / "wrong")
        assert not wrong.ok
        assert "groups of 3 do not divide 4 devices" in wrong.error
        set_rate(made, 250e6)
        slow = session.run(toml({"kind": "zero3"}), tmp_path / "slow")
        assert slow.ok, slow.error
        with pytest.raises(SessionError, match="no answer"):
            session.run(toml({"kind": "ddp"}, 100_000), tmp_path / "long", timeout_s=0.5)

    for outcome in (fast, slow):
        assert outcome.measured is not None
        assert outcome.predicted is not None
        assert outcome.measured["cluster"]["nodes"] == 2
        assert len(outcome.step_s) == TIMED
    # Gathers and scatters are between ranks of one host and stay off the link; only the gradients
    # of each host are summed with those of the other.
    assert sent / STEPS == pytest.approx(PARAMETERS_BYTES, rel=0.1)
    # At least half of every parameter comes over a host's link, and half of every gradient.
    least_s = PARAMETERS_BYTES * 8 / 250e6
    assert min(slow.step_s) > least_s
    assert min(fast.step_s) < min(slow.step_s)
