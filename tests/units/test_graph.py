"""The little operation lists behind the formulas, on cases small enough to follow by eye."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardwise.units.decoder import decoder_units
from shardwise.units.graph import Graph, Value
from shardwise.units.graph_stage import stage_of
from shardwise.units.stage import Moment, prune
from tests.units.reduced import reduced


def two_layers() -> Graph:
    """x (10) → linear → a (20) → gelu → b (20) → linear → y (10), two bytes each."""
    graph = Graph(itemsize=2, input=Value(10, 2))
    a = graph.linear(graph.input, "up", 20)
    b = graph.pointwise(a, saves=(a,))
    graph.linear(b, "down", 10)
    return graph


def test_what_is_saved() -> None:
    kept = stage_of(two_layers()).kept
    assert kept["none"].activation_bytes == 2 * (10 + 20 + 20)
    assert kept["full"].activation_bytes == 2 * 10
    # Selective keeps the first matmul's output beside the input.
    assert kept["selective"].activation_bytes == 2 * (10 + 20)


def test_recomputation_stops_before_the_last_matmul() -> None:
    kept = stage_of(two_layers()).kept
    assert kept["full"].recomputed_matmul_flops == 2 * 10 * 20
    assert kept["selective"].recomputed_matmul_flops == 0


def test_the_backward_walks_down() -> None:
    moments = stage_of(two_layers()).backward
    # At the top: all three saved, the gradients of y and b. 200 + 200 weights follow in turn.
    assert moments[0] == Moment(
        activation_bytes=2 * (10 + 20 + 20 + 10 + 20), logit_bytes=0, gradient_elements=200
    )
    assert moments[-1].gradient_elements == 400


def test_a_compiler_keeps_what_a_matmul_reads() -> None:
    # As torch's partitioner does: the second matmul's backward needs b in memory.
    assert stage_of(two_layers(), compiled=True).kept["none"].activation_bytes == 2 * (10 + 20 + 20)


def test_a_compiler_recomputes_between_element_wise_operations() -> None:
    graph = Graph(itemsize=2, input=Value(10, 2))
    a = graph.linear(graph.input, "up", 20)
    b = graph.pointwise(a, saves=(a,))
    c = graph.pointwise(b, saves=(b,))
    graph.linear(c, "down", 10)
    # b is made again from a; the input, a and c are kept.
    assert stage_of(graph).kept["none"].activation_bytes == 2 * (10 + 20 + 20 + 20)
    assert stage_of(graph, compiled=True).kept["none"].activation_bytes == 2 * (10 + 20 + 20)


def test_grouping_blocks_adds_up() -> None:
    units = decoder_units(reduced("llama", layers=7), 64)
    for size in (1, 2, 3, 7, 10):
        grouped = units.grouped(size)
        assert len(grouped.blocks) == -(-7 // size)
        assert grouped.numel == units.numel
        assert abs(grouped.forward_flops() - units.forward_flops()) < 1e-6 * units.forward_flops()
        for policy in ("none", "selective", "full"):
            kept = [
                sum(b.stage.kept[policy].activation_bytes for b in u.blocks)
                for u in (units, grouped)
            ]  # type: ignore[index]
            assert abs(kept[0] - kept[1]) < 1e-6


@given(
    st.lists(
        st.tuples(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6)), min_size=1, max_size=20
    ),
    st.floats(0, 1e6),
)
def test_pruning_never_loses_a_peak(
    points: list[tuple[float, float, float]], weight: float
) -> None:
    moments = [Moment(activation_bytes=a, logit_bytes=b, gradient_elements=g) for a, b, g in points]

    def peak(found: list[Moment]) -> float:
        return max(m.activation_bytes + m.logit_bytes + weight * m.gradient_elements for m in found)

    assert peak(list(prune(moments))) == peak(moments)
