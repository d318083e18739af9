"""State bytes, phases and terms: formulas written out, and laws that must hold everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.predict.configurations import Configurations
from shardwise.predict.memory import predict_memory, sum_terms
from shardwise.predict.program.events import PHASES, TERMS, Alloc, Instant, Phase
from shardwise.predict.program.step import step_program
from shardwise.predict.work import predict_work
from shardwise.spec import catalogue
from shardwise.spec.model import ModelSpec
from shardwise.units.decoder import decoder_units
from shardwise.units.unit import ModelUnits, Unit
from tests.predict.blocks import unrolled
from tests.predict.toy import bare_units, memory, resolve
from tests.units.reduced import reduced

STATE = ("parameters", "gradients", "optimizer")


def alive(units: ModelUnits, strategy: Any) -> Iterator[tuple[str, dict[str, float]]]:
    """Phase and bytes by term at every instant of a step, one after the other."""
    now, phase = dict.fromkeys(map(str, TERMS), 0.0), ""
    for event in unrolled(step_program(units, Configurations.of([strategy]))):
        if isinstance(event, Phase):
            phase = event.name
        elif isinstance(event, Alloc):
            now[event.term] += float(event.bytes[0])
        elif isinstance(event, Instant):
            ledger = dict(now)
            for also in event.also:
                ledger[also.term] += float(also.bytes[0])
            yield phase, ledger


def at_rest(units: ModelUnits, strategy: Any) -> float:
    """Parameters, gradients and optimizer states when a step has ended, per parameter."""
    ledger = memory(units, strategy).phases["optimizer step"]
    return sum(float(ledger[term][0]) for term in STATE) / units.numel


def test_sixteen_bytes_a_parameter_alone_and_eight_on_two() -> None:
    units = decoder_units(catalogue.model("gpt2"), 1024, "fp32")
    fp32 = {"param_dtype": "fp32"}
    assert at_rest(units, resolve("single", 1, **fp32)) == 16.000
    assert at_rest(units, resolve("ddp", 2, **fp32)) == 16.000
    for kind in ("zero1", "zero2", "zero3"):
        # GPT-2's vocabulary is odd: one row of padding on each rank is all that is added.
        padding = 768 / units.numel
        assert at_rest(units, resolve(kind, 2, **fp32)) == pytest.approx(
            8 * (1 + padding), rel=1e-12
        )


@pytest.mark.parametrize("shard", [2, 3, 4, 8, 64, 1000])
def test_padding_is_counted_as_fsdp2_pads(shard: int) -> None:
    units = decoder_units(catalogue.model("gpt2"), 1024, "fp32")
    per_rank = sum(
        -(-p.shape[0] // shard) * (p.numel // p.shape[0]) for u in units.units for p in u.parameters
    )
    ledger = memory(units, resolve("zero3", shard, param_dtype="fp32")).phases["optimizer step"]
    assert ledger["parameters"][0] == 4 * per_rank
    assert ledger["gradients"][0] == 4 * per_rank
    assert ledger["optimizer"][0] == 8 * per_rank


@pytest.mark.parametrize(("precision", "q"), [("fp32", 4), ("bf16", 2)])
def test_zero_stages_by_formula(precision: str, q: int) -> None:
    """Ψ parameters over N devices, with parameters that no padding blurs."""
    units = bare_units(40, rows=64, columns=64, root_rows=64)
    n, psi = 8, units.numel
    settings = {"param_dtype": precision, "reduce_dtype": "fp32"}
    unit = 64 * 64

    def during(kind: str, **more: Any) -> dict[str, float]:
        found = memory(units, resolve(kind, n, **settings, **more)).phases["end of forward"]
        return {term: float(found[term][0]) for term in TERMS}

    def states(ledger: dict[str, float]) -> float:
        return sum(ledger[t] for t in (*STATE, "unsharded_parameters", "unsharded_gradients"))

    # Shards of fp32 parameters and two states, plus the gathered copy that the stage keeps. Beside
    # it one unit's flat buffer is still held.
    assert states(during("zero3")) == 12 * psi / n + q * (unit + unit)
    assert states(during("zero2")) == 12 * psi / n + q * (psi + unit)
    # With gradients of earlier micro-batches: sharded under zero2, whole under zero1. Nothing is
    # gathered anew, so no buffer is held.
    assert states(during("zero2", accumulate=2)) == 16 * psi / n + q * psi
    assert states(during("zero1", accumulate=2)) == 12 * psi / n + q * psi + 4 * psi
    # Hybrid sharding shares inside the group only.
    hybrid = memory(units, resolve("zero3:4", 8, 4, **settings)).phases["optimizer step"]
    assert sum(float(hybrid[t][0]) for t in STATE) == 16 * psi / 4


def test_the_published_gpt2_large_figures() -> None:
    # N = 2, fp32 Adam: 12.38 GB of states for DDP, 9.29 GB at zero2's peak, 6.19 GB for zero3.
    units = decoder_units(catalogue.model("gpt2-large"), 1024, "fp32")
    fp32 = {"param_dtype": "fp32"}
    assert at_rest(units, resolve("ddp", 2, **fp32)) * units.numel == pytest.approx(
        12.38e9, rel=1e-3
    )
    assert at_rest(units, resolve("zero3", 2, **fp32)) * units.numel == pytest.approx(
        6.19e9, rel=1e-3
    )
    zero2 = memory(units, resolve("zero2", 2, **fp32)).phases["loss backward"]
    held = float(zero2["unsharded_parameters"][0])
    assert held + at_rest(units, resolve("zero2", 2, **fp32)) * units.numel == pytest.approx(
        9.29e9, rel=1e-3
    )


def test_logits_dominate_a_small_model_with_a_large_vocabulary() -> None:
    # log-probabilities, their gradient and the logits' gradient, fp32: three of 8·1024·50257·4 B.
    units = decoder_units(catalogue.model("gpt2"), 1024, "fp32")
    found = memory(units, resolve("single", 1, micro_batch=8, param_dtype="fp32"))
    assert found.peak_phase() == "loss backward"
    assert found.terms_at_peak()["logits"] == 3 * 8 * 1024 * 50257 * 4


def test_the_phase_that_sets_the_peak_changes() -> None:
    model = catalogue.model("llama-3-8b")

    def phase(kind: str, devices: int, seq_len: int = 4096, **settings: Any) -> str:
        units = decoder_units(model, seq_len)
        return memory(units, resolve(kind, devices, **settings)).peak_phase()

    assert phase("zero3", 8) == "loss backward"
    assert phase("zero3", 8, 64, recompute="full") == "last backward"
    assert phase("ddp", 8, 16, recompute="full", param_dtype="fp32") in PHASES
    wide = decoder_units(model.but(vocab=100), 4096)
    assert memory(wide, resolve("zero3", 8, recompute="full")).peak_phase() == "steady backward"


def test_selective_and_partial_recompute_lie_between() -> None:
    units = decoder_units(catalogue.model("llama-3-8b"), 4096)
    peaks = [
        float(memory(units, resolve("zero3", 8, recompute=r)).peak_bytes[0])
        for r in ("none", 0.25, 0.5, 0.75, "full")
    ]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 5
    selective = float(memory(units, resolve("zero3", 8, recompute="selective")).peak_bytes[0])
    assert peaks[-1] < selective < peaks[0]


def test_offload_moves_states_to_the_host() -> None:
    units = decoder_units(catalogue.model("llama-3-8b"), 4096)
    kept = memory(units, resolve("zero3", 8))
    moved = memory(units, resolve("zero3", 8, offload=True))
    ledger = moved.phases["optimizer step"]
    assert all(float(ledger[term][0]) == 0 for term in STATE)
    state = sum(float(kept.phases["optimizer step"][term][0]) for term in STATE)
    assert float(moved.host_bytes[0]) == state


def test_an_integer_reshard_keeps_larger_shards_until_the_backward() -> None:
    units = bare_units(6, rows=64, columns=8, root_rows=64)
    settings = {"param_dtype": "bf16"}
    whole = memory(units, resolve("zero3", 8, **settings)).phases["loss backward"]
    small = memory(units, resolve("zero3", 8, reshard_after_forward=2, **settings))
    extra = small.phases["loss backward"]["unsharded_parameters"] - whole["unsharded_parameters"]
    assert float(extra[0]) == 2 * 6 * 64 * 8 / 2


SETTINGS = st.fixed_dictionaries(
    {
        "micro_batch": st.integers(1, 8),
        "accumulate": st.integers(1, 4),
        "recompute": st.sampled_from(["none", "selective", "full", 0.3, 0.5]),
        "param_dtype": st.sampled_from(["fp32", "bf16"]),
        "reduce_dtype": st.sampled_from(["fp32", "bf16"]),
        "grad_sync": st.sampled_from([None, "every", "local", "last"]),
        "prefetch": st.integers(0, 3),
        "blocks_per_unit": st.integers(1, 3),
    }
)
KINDS = st.sampled_from(["ddp", "zero1", "zero2", "zero3", "zero3:2", "zero2:4"])


def priced(spec: ModelSpec, seq_len: int, strategies: list[Any]) -> np.ndarray:
    units = decoder_units(spec, seq_len, strategies[0].param_dtype)
    grouped = units.grouped(strategies[0].blocks_per_unit)
    found = predict_memory(grouped, Configurations.of(strategies))
    for phase in PHASES:
        for term in TERMS:
            assert (found.phases[phase][term] >= 0).all(), (phase, term)
    totals = np.stack([sum_terms(found.phases[phase]) for phase in PHASES])
    assert (found.peak_bytes == totals.max(axis=0)).all()
    for row in range(len(strategies)):
        assert sum(found.terms_at_peak(row).values()) == pytest.approx(found.peak_bytes[row])
    return found.peak_bytes


@given(kind=KINDS, settings=SETTINGS, family=st.sampled_from(["gpt2", "llama", "gemma3_text"]))
def test_more_batch_never_takes_less(kind: str, settings: dict[str, Any], family: str) -> None:
    rows = [resolve(kind, 8, **{**settings, "micro_batch": b}) for b in (1, 2, 3, 5, 8)]
    peaks = priced(reduced(family, layers=7), 128, rows)
    assert (np.diff(peaks) >= 0).all()


@given(kind=KINDS, settings=SETTINGS)
def test_longer_sequences_and_larger_models_never_take_less(
    kind: str, settings: dict[str, Any]
) -> None:
    strategy = [resolve(kind, 8, **settings)]
    by_length = [priced(reduced("llama", layers=4), s, strategy)[0] for s in (32, 64, 200, 512)]
    by_width = [priced(reduced("llama", layers=4, ffn=f), 64, strategy)[0] for f in (64, 704, 2048)]
    by_depth = [priced(reduced("llama", layers=n), 64, strategy)[0] for n in (1, 2, 5, 9)]
    for peaks in (by_length, by_width, by_depth):
        assert peaks == sorted(peaks)


@given(
    kind=st.sampled_from(["zero1", "zero2", "zero3"]),
    settings=SETTINGS,
    replicate=st.sampled_from([1, 2]),
)
def test_more_shards_never_take_more(kind: str, settings: dict[str, Any], replicate: int) -> None:
    # Row counts that every degree divides: padding may otherwise outweigh the gain.
    spec = reduced("llama", layers=5, vocab=1024, ffn=768)
    rows = [
        resolve(f"{kind}:{shard}", shard * replicate, **settings) for shard in (2, 4, 8, 16, 32, 64)
    ]
    assert (np.diff(priced(spec, 128, rows)) <= 0).all()


@given(
    kind=KINDS,
    settings=SETTINGS,
    family=st.sampled_from(["llama", "gemma3_text"]),
    layers=st.integers(1, 14),
)
def test_a_repeated_body_is_read_once_and_has_the_peak_of_all_its_repetitions(
    kind: str, settings: dict[str, Any], family: str, layers: int
) -> None:
    strategy = resolve(kind, 8, **settings)
    units = decoder_units(reduced(family, layers=layers), 128, strategy.param_dtype)
    grouped = units.grouped(strategy.blocks_per_unit)
    read = memory(grouped, strategy)
    largest = dict.fromkeys(PHASES, 0.0)
    for phase, ledger in alive(grouped, strategy):
        largest[phase] = max(largest[phase], sum(ledger.values()))
    for phase in PHASES:
        assert sum_terms(read.phases[phase])[0] == pytest.approx(largest[phase], rel=1e-12)


def without_gradients(unit: Unit) -> Unit:
    frozen = tuple(parameter._replace(trainable=False) for parameter in unit.parameters)
    return replace(unit, parameters=frozen)


@given(kind=KINDS, settings=SETTINGS, layers=st.integers(1, 9), frozen=st.integers(0, 9))
def test_a_step_leaves_nothing_behind(
    kind: str, settings: dict[str, Any], layers: int, frozen: int
) -> None:
    """Of all blocks, of those above some that are frozen, or of the head alone."""
    strategy = resolve(kind, 8, **settings)
    units = decoder_units(reduced("llama", layers=layers), 128, strategy.param_dtype)
    if frozen:
        below = without_gradients(units.blocks[0])
        blocks = tuple(b if i >= frozen else below for i, b in enumerate(units.blocks))
        head = tuple(p._replace(trainable=p.after_blocks) for p in units.root.parameters)
        units = replace(units, blocks=blocks, root=replace(units.root, parameters=head))
    program = step_program(units, Configurations.of([strategy]))
    left = dict.fromkeys(TERMS, 0.0)
    for event in unrolled(program):
        if isinstance(event, Alloc):
            left[event.term] += float(event.bytes[0])
    stays = {"parameters", "optimizer"} | ({"gradients"} if kind == "ddp" else set())
    held = max(left["optimizer"], 1.0)
    for term in TERMS:
        if term not in stays:
            assert left[term] == pytest.approx(0.0, abs=1e-9 * held), term


@given(settings=st.lists(st.tuples(KINDS, SETTINGS), min_size=2, max_size=8))
def test_many_at_once_are_what_each_is_alone(settings: list[tuple[str, dict[str, Any]]]) -> None:
    units = decoder_units(reduced("llama", layers=6), 128, "bf16")
    rows = [
        resolve(kind, 8, **{**s, "param_dtype": "bf16", "blocks_per_unit": 1})
        for kind, s in settings
    ]
    together = predict_memory(units, Configurations.of(rows)).peak_bytes
    alone = [float(memory(units, row).peak_bytes[0]) for row in rows]
    assert together == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("recompute", ["none", "selective", "full", 0.3])
def test_what_blocks_keep_does_not_depend_on_how_many_are_in_a_unit(recompute: Any) -> None:
    """Each block recomputes by itself: only its unit's parameters and gradients grow."""
    spec = catalogue.model("llama-3.1-8b")
    held = []
    for blocks in (1, 2, 4):
        strategy = resolve("zero3", 8, recompute=recompute, micro_batch=4, blocks_per_unit=blocks)
        units = decoder_units(spec, 4096).grouped(blocks)
        ledgers = [ledger for phase, ledger in alive(units, strategy) if "steady" in phase]
        held.append(max(ledger["activations"] for ledger in ledgers))
    assert held == pytest.approx([held[0]] * 3, rel=1e-9)


def test_a_share_of_recompute_counts_blocks_not_units() -> None:
    """30 % of 7 blocks are 3 blocks, also in units of 2, as the engine applies it."""
    units = decoder_units(reduced("llama", layers=7), 128)
    strategy = resolve("zero3", 8, recompute=0.3, blocks_per_unit=2)
    grouped = units.grouped(2)
    kept = units.blocks[0].stage.kept
    by_hand = 3 * kept["full"].activation_bytes + 4 * kept["none"].activation_bytes
    after = [ledger for phase, ledger in alive(grouped, strategy) if phase == "end of forward"]
    head = units.root.stage.forward_peak.activation_bytes
    held = after[0]["activations"] / (strategy.micro_batch * units.seq_len) - head
    assert held == pytest.approx(by_hand)
    again = 3 * units.blocks[0].stage.recomputed_flops("full")
    work = predict_work(grouped, Configurations.of([strategy]))
    model = float(work.model_flops[0])
    expected = model + again * float(work.tokens[0])
    assert float(work.hardware_flops[0]) == pytest.approx(expected)
