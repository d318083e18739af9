"""Real traces of others, against answers that two independent implementations agree on."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import numpy as np
import pytest

from shardwise.observe.file.trace import read_trace
from shardwise.observe.rank.classify import device_timeline, host_timeline
from shardwise.observe.rank.summary import summarise_rank
from shardwise.observe.ranks import join_collectives
from shardwise.step.breakdown import breakdown

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason="needs the traces beside the project")

# Idle, compute, and the rest of the window; communication hidden behind compute; all in percent.
ANSWERS = {
    "hta/df_index_resolver_rank1of2_v100": (42.26, 35.81, 21.93, 0.0),
    "hta/trace_diff_control_rank3of8_a100": (16.36, 60.56, 23.09, 46.24),
    "hta/trace_diff_test_rank1of2_v100": (3.66, 73.55, 22.78, 70.84),
    "hta/negative_queue_rank0of16_a100": (64.40, 17.13, 18.47, 1.36),
    "hta/ns_resolution_rank0of1_v100": (1.58, 97.53, 0.89, None),
    "hta/nccl_data_rank0of2_a100": (76.16, 17.51, 6.33, 15.61),
    "tracelens/xdit_sd35_triton_mi300x": (39.19, 60.77, 0.04, None),
    "tracelens/owlv2_h100": (47.44, 51.14, 1.42, None),
    "tracelens/ddp_resnet_rank0of8_mi300x": (2.96, 29.73, 67.30, 22.22),
}
# The answers have two decimals.
NEAR = 0.0151


@pytest.mark.parametrize("name", ANSWERS)
def test_where_the_time_of_a_device_went(name: str) -> None:
    idle, compute, rest, hidden = ANSWERS[name]
    trace = read_trace(TRACES / f"{name}.json.gz")
    assert not trace.problems
    found = breakdown(device_timeline(trace))
    percent = found.window_ns / 100
    assert found.idle_ns / percent == pytest.approx(idle, abs=NEAR)
    assert found.compute_ns / percent == pytest.approx(compute, abs=NEAR)
    exposed = found.exposed_communication_ns + found.exposed_copy_ns
    assert exposed / percent == pytest.approx(rest, abs=NEAR)
    if hidden is None:
        assert found.overlap is None
    else:
        assert found.overlap is not None
        assert 100 * found.overlap == pytest.approx(hidden, abs=NEAR)


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("sync_rank0", 0.0),
        ("sync_rank1", 0.0),
        ("sync_noreshard_rank0", 0.0),
        ("sync_noreshard_rank1", 0.0),
        ("async_prefetch_rank0", 45.3),
        ("async_prefetch_rank1", 40.7),
    ],
)
def test_what_a_cpu_hides(name: str, hidden: float) -> None:
    """The median over the profiled steps: threads wait inside events that look like work."""
    trace = read_trace(TRACES / "fsdp2_cpu_gloo" / f"{name}.json.gz")
    timeline = host_timeline(trace)
    steps = [
        (int(trace.start_ns[row]), int(trace.end_ns[row]))
        for row in np.flatnonzero(trace.in_category("user_annotation"))
        if trace.texts[trace.name[row]].startswith("ProfilerStep")
    ]
    assert len(steps) == 3
    shares = [breakdown(timeline, step).overlap for step in steps]
    assert median(100 * (share or 0.0) for share in shares) == pytest.approx(hidden, abs=0.051)


@pytest.mark.parametrize(
    ("name", "kernels_ms", "transfer_ms", "last"),
    [
        ("param_dlrm_8rank", 6.07, 0.22, {}),
        ("megatron_tp8_8rank", 417.5, 50.1, {0: 32, 6: 34}),
    ],
)
def test_most_of_a_collective_is_waiting(
    name: str, kernels_ms: float, transfer_ms: float, last: dict[int, int]
) -> None:
    paths = [TRACES / name / f"rank{rank}.json.gz" for rank in range(8)]
    joined = join_collectives([summarise_rank(path).calls for path in paths])
    assert joined.mean_ns / 1e6 == pytest.approx(kernels_ms, rel=2e-3)
    assert joined.transfer_ns / 1e6 == pytest.approx(transfer_ms, rel=2e-2)
    assert joined.unmatched == [0] * 8
    late = joined.last_to_arrive()
    assert {rank: int(late[rank]) for rank in last} == last
