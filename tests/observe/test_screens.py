"""Screens of `shardwise trace`, and the sums on them: every figure is per step."""

from __future__ import annotations

import dataclasses
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from shardwise.observe.analysis import read_traces
from shardwise.observe.rank.summary import RankSummary
from shardwise.observe.summary import summarise
from shardwise.report.trace import print_trace
from tests.command import shardwise
from tests.observe.synthetic import Plan, build
from tests.screens import assert_screen

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
REAL = {
    "megatron": ["megatron_tp8_8rank"],
    "dlrm": ["param_dlrm_8rank"],
    "fsdp2-cpu": [f"fsdp2_cpu_gloo/async_prefetch_rank{rank}.json.gz" for rank in (0, 1)],
    "resnet-data": ["kineto_tb/resnet50_num_workers_0.json.gz"],
    "one-of-two": ["hta/nccl_data_rank0of2_a100.json.gz"],
    "copies": ["hta/trace_diff_control_rank3of8_a100.json.gz"],
    "one-of-eight": ["tracelens/ddp_resnet_rank0of8_mi300x.json.gz"],
    "no-steps": ["hta/mi250_minitoy.json.gz"],
}
SYNTHETIC = {
    "healthy": Plan(ranks=4, forward=4000, backward=8000),
    "straggler": Plan(ranks=8, late={5: ("data", 20_000)}),
    "straggler-host": Plan(ranks=4, late={2: ("host", 30_000)}, blocks=4),
    "communication-bound": Plan(ranks=4, gather=2000, scatter=2200),
    "late-gathers": Plan(prefetched=False, gather=400, scatter=50),
    "queued-gathers": Plan(separate=False, gather=700, scatter=900, backward=1000, micro_batches=2),
    "host-bound": Plan(host_gap=300, gather=10, scatter=10, forward=500),
    "synchronised": Plan(synchronised=6000, malloc=1000, elements=16_384, gather=1500, forward=500),
}


@pytest.mark.parametrize("name", SYNTHETIC)
def test_synthetic_screens(tmp_path: Path, name: str) -> None:
    build(tmp_path, SYNTHETIC[name])
    show(f"trace-{name}", tmp_path)


def test_a_cluster_adds_its_peaks(tmp_path: Path) -> None:
    plan = Plan(gather=20_000, scatter=100, forward=1000, backward=3000, blocks=4)
    build(tmp_path, plan)
    show("trace-slow-link", tmp_path, "--cluster", "1x2xH100-SXM")


@pytest.mark.parametrize("name", REAL)
def test_real_screens(name: str) -> None:
    paths = [TRACES / part for part in REAL[name]]
    if not all(path.exists() for path in paths):
        pytest.skip("needs the traces beside the project")
    show(f"trace-real-{name}", *paths)


def show(name: str, *words: object) -> None:
    done = shardwise("trace", *map(str, words))
    assert done.returncode == 0, done.stderr
    assert_screen(name, done.stdout)
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("plan", SYNTHETIC.values(), ids=SYNTHETIC)
def test_parts_never_exceed_what_they_are_part_of(tmp_path: Path, plan: Plan) -> None:
    for rank in summarise(build(tmp_path, plan).paths).ranks:
        assert_sums(rank)


@pytest.mark.parametrize(
    "path", sorted(TRACES.glob("*/*.json.gz")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_parts_of_real_traces_never_exceed_what_they_are_part_of(path: Path) -> None:
    assert_sums(summarise([path]).ranks[0])


def assert_sums(rank: RankSummary) -> None:
    """Collectives and units of the profiled steps against the breakdown of the same steps."""
    parts = rank.profiled
    assert sum(parts[:4]) == parts.window_ns
    assert sum(one.exposed_ns for one in rank.collectives) == parts.exposed_communication_ns
    assert sum(one.total_ns for one in rank.collectives) >= parts.communication_ns
    for one in rank.collectives:
        assert 0 <= one.exposed_ns <= one.total_ns
    if not rank.units:
        return
    exposed = total = 0
    for unit in rank.units:
        for spent, alone in (
            (unit.gather_forward_ns, unit.gather_forward_exposed_ns),
            (unit.gather_backward_ns, unit.gather_backward_exposed_ns),
            (unit.scatter_ns, unit.scatter_exposed_ns),
        ):
            assert 0 <= alone <= spent
            exposed, total = exposed + alone, total + spent
    assert exposed <= parts.exposed_communication_ns
    assert total <= sum(one.total_ns for one in rank.collectives)
    assert sum(u.forward_ns + u.backward_ns for u in rank.units) <= parts.compute_ns


def test_long_names_of_units_are_shown_in_full(tmp_path: Path) -> None:
    build(tmp_path, SYNTHETIC["healthy"])
    trace = read_traces(sorted(tmp_path.iterdir()))
    name = "model.language_model.layers.0.mlp.experts"
    first = trace.summary.ranks[0]
    named = first._replace(units=[first.units[0]._replace(unit=name)])
    screen = StringIO()
    summary = trace.summary._replace(ranks=[named, *trace.summary.ranks[1:]])
    print_trace(dataclasses.replace(trace, summary=summary), console=Console(file=screen, width=80))
    table = screen.getvalue().partition("FSDP units")[2].splitlines()
    assert max(map(len, table)) <= 80
    assert name in "".join(line.split(" ")[0] for line in table)
