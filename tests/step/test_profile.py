"""A StepProfile as JSON, and read again."""

from __future__ import annotations

from shardwise.predict.api import estimate_run
from shardwise.spec.question import describe_run
from shardwise.step.profile import read_profile


def test_times_inside_blocks_have_a_key_for_each_axis_in_json() -> None:
    profile = estimate_run(describe_run("llama-3-8b", "2x8xH100-SXM@400Gbps", "zero3 tp8 cp2"))
    assert profile.time is not None
    inside = profile.time.inside_s
    assert inside is not None
    assert set(inside) == {"tensor", "context"}
    written = profile.to_dict()
    assert written["time"]["tensor_s"] == inside["tensor"] > 0
    assert "inside_s" not in written["time"]
    again = read_profile(written, "here").time
    assert again is not None
    assert again.inside_s == inside
