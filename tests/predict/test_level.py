"""A measured step of the user's own corrects predictions and narrows their interval."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import shardwise
from shardwise.predict.intervals import error_interval
from shardwise.predict.level import correction_factor, narrowing_factor
from shardwise.spec.level import Level
from shardwise.spec.lookup import find_cluster, write_cluster
from shardwise.spec.record import SpecError
from tests.command import shardwise as command

ASKED = ("--model", "llama-3-8b", "--cluster", "8xH100-SXM", "--seq-len", "4096")


def test_one_step_moves_part_of_the_way_and_many_nearly_all() -> None:
    factors = [correction_factor(Level(factor=1.3, steps=steps)) for steps in (1, 2, 3, 100)]
    assert factors == sorted(factors)
    assert 1.0 < factors[0] < 1.3
    assert factors[-1] == pytest.approx(1.3, rel=0.02)
    assert correction_factor(Level(factor=1.0)) == 1.0


def test_the_interval_shrinks_to_what_runs_of_one_stack_differ_by() -> None:
    widths = [narrowing_factor("dense", steps) for steps in (1, 2, 3, 1000)]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] < 1.0
    cluster = find_cluster("8xH100-SXM")
    before, after = (
        error_interval(one)[1] for one in (cluster, cluster.but(level=Level(factor=2.0)))
    )
    assert math.log1p(after) == pytest.approx(widths[0] * math.log1p(before), rel=1e-6)


def test_a_cluster_file_keeps_it(tmp_path: Path) -> None:
    cluster = find_cluster("8xH100-SXM").but(level=Level(factor=1.2, steps=2))
    (tmp_path / "cluster.toml").write_text(write_cluster(cluster))
    assert find_cluster(str(tmp_path / "cluster.toml")) == cluster


def test_a_plan_is_corrected_by_the_step_of_its_run(tmp_path: Path) -> None:
    run, better = tmp_path / "run.toml", tmp_path / "better.toml"
    command("plan", *ASKED, "-o", str(run))
    first = json.loads(command("plan", str(run), "--json").stdout)
    told = json.loads(command("estimate", str(run), "--json").stdout)["time"]["step_s"]
    measured = f"{1.2 * told:.6f}s"
    done = command("plan", str(run), "--measured", measured, "-o", str(better), "--json")
    assert done.returncode == 0, done.stderr
    second = json.loads(done.stdout)
    moved = correction_factor(Level(factor=1.2))
    assert second["winner"]["step_s"] == pytest.approx(moved * first["winner"]["step_s"], rel=1e-4)
    assert second["error_interval"] == first["interval_after_a_step"]
    # What is written keeps it, and the screen says so.
    screen = command("plan", str(better)).stdout
    assert "corrected by one measured step" in " ".join(screen.split())
    assert "one more measured step makes it" in screen
    assert len(screen.splitlines()) <= 30
    # An estimate of the same run is corrected as well.
    estimated = json.loads(command("estimate", str(run), "--measured", measured, "--json").stdout)
    assert estimated["time"]["step_s"] == pytest.approx(moved * told, rel=1e-4)


def test_the_record_of_a_run_is_as_good_as_its_seconds(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    command("plan", *ASKED, "-o", str(folder / "run.toml"))
    (folder / "measurement.json").write_text(json.dumps({"time": {"step_s": 2.0}}))
    by_folder = shardwise.estimate(run=folder / "run.toml", measured=folder)
    by_seconds = shardwise.estimate(run=folder / "run.toml", measured=2.0)
    assert by_folder.time == by_seconds.time
    twice = shardwise.estimate(run=folder / "run.toml", measured=["2s", folder])
    assert twice.time is not None
    assert by_seconds.time is not None
    assert abs(twice.time.step_s - 2.0) < abs(by_seconds.time.step_s - 2.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--measured", "3.2s"), "name the run whose step it is"),
        (("--measured", "fast"), "name the run whose step it is"),
        (("--measured", "0s"), "name the run whose step it is"),
    ],
)
def test_a_step_of_nothing_is_one_sentence(words: tuple[str, ...], message: str) -> None:
    done = command("plan", *ASKED, *words)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_step_that_is_none_and_a_foreign_device_are_told(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    command("plan", *ASKED, "-o", str(run))
    for measured, message in (
        ("fast", "cannot read 'fast'"),
        ("0s", "write it like 3.2s"),
        ("100000s", "check its unit"),
        ("0.1ms", "check its unit"),
    ):
        done = command("estimate", str(run), "--measured", measured)
        assert done.returncode == 2
        assert message in done.stderr
    folder = tmp_path / "other"
    folder.mkdir()
    command("plan", *ASKED[:2], "--cluster", "8xA100-80GB", "-o", str(folder / "run.toml"))
    (folder / "measurement.json").write_text(json.dumps({"time": {"step_s": 2.0}}))
    with pytest.raises(SpecError, match="says nothing of H100-SXM"):
        shardwise.estimate(run=run, measured=folder)
    for step_s in (0.0, -1.0):
        (folder / "measurement.json").write_text(json.dumps({"time": {"step_s": step_s}}))
        with pytest.raises(SpecError, match="has no step time"):
            shardwise.estimate(run=run, measured=folder)
