"""A reference model beside the trained one: its bytes, collectives and FLOPs, written out."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.predict.api import estimate_run
from shardwise.predict.configurations import Configurations
from shardwise.predict.program.events import Alloc
from shardwise.predict.program.step import step_program
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec, run_from_dict
from shardwise.step.profile import StepProfile
from shardwise.trainer.admit import check_can_train
from shardwise.units.load import job_units
from shardwise.units.unit import ModelUnits
from tests.predict.blocks import unrolled

DEVICES, GIB = 8, 2**30
LORA = {"rank": 16, "base": "bf16"}


def run_of(kind: str = "zero3", adapter: Any = None, **job: Any) -> RunSpec:
    name, _, shard = kind.partition(":")
    groups = {"shard": int(shard)} if shard else {}
    sections = {
        "model": "llama-3.2-1b",
        "cluster": f"{DEVICES}xH100-SXM",
        "job": {"seq_len": 512, **job},
        "strategy": {"kind": name, **groups, "micro_batch": 4, "recompute": "full"},
        **({"adapter": adapter} if adapter else {}),
    }
    return run_from_dict(sections).resolved()


def units_of(run: RunSpec) -> ModelUnits:
    return job_units(run.model, run.job, run.strategy, run.cluster)


def both(kind: str = "zero3", adapter: Any = None, **job: Any) -> tuple[StepProfile, StepProfile]:
    plain = estimate_run(run_of(kind, adapter))
    return plain, estimate_run(run_of(kind, adapter, method="dpo", **job))


def gathers(profile: StepProfile) -> tuple[int, int]:
    found = [(one.calls, one.bytes) for one in profile.traffic if one.op == "all_gather"]
    return found[0] if found else (0, 0)


def test_a_copy_is_held_like_the_trained_model() -> None:
    units = units_of(run_of(method="dpo"))
    padded = sum(unit.padded_numel(DEVICES) for unit in units.units)
    _, sharded = both("zero3")
    assert sharded.known_memory.terms["reference"] == 4 * padded / DEVICES
    # Never resharded, as no backward follows: all of it in bf16 beside the fp32 shards.
    _, kept = both("zero2")
    assert kept.known_memory.terms["reference"] == 4 * padded / DEVICES + 2 * padded
    _, replicated = both("ddp")
    assert replicated.known_memory.terms["reference"] == 4 * units.numel


def test_its_forward_gathers_every_unit_once_more() -> None:
    units = units_of(run_of(method="dpo"))
    size = 2 * sum(unit.padded_numel(DEVICES) for unit in units.units)
    plain, dpo = both("zero3")
    assert gathers(dpo) == (gathers(plain)[0] + len(units.units), gathers(plain)[1] + size)
    assert gathers(both("zero2")[0]) == gathers(both("zero2")[1])
    for op in ("reduce_scatter", "all_reduce"):
        sent = [[one for one in each.traffic if one.op == op] for each in (plain, dpo)]
        assert sent[0] == sent[1]


@pytest.mark.parametrize("kind", ["zero3", "zero2", "ddp"])
def test_a_forward_is_a_third_of_forward_and_backward(kind: str) -> None:
    plain, dpo = both(kind)
    assert plain.work is not None
    assert dpo.work is not None
    assert dpo.work.model_flops == pytest.approx(4 / 3 * plain.work.model_flops, rel=1e-12)
    assert plain.time is not None
    assert dpo.time is not None
    assert plain.time.step_s < dpo.time.step_s
    computing, with_reference = plain.time.compute_s, dpo.time.compute_s
    assert computing is not None
    assert with_reference is not None
    assert computing < with_reference < 4 / 3 * computing


def test_with_adapters_the_reference_is_the_model_itself() -> None:
    plain, dpo = both("zero3", LORA)
    units = units_of(run_of(adapter=LORA, method="dpo"))
    assert "reference" not in dpo.known_memory.terms
    assert gathers(dpo)[0] == gathers(plain)[0] + len(units.blocks)
    assert dpo.known_memory.terms["parameters"] == plain.known_memory.terms["parameters"]


def test_without_a_reference_a_step_is_that_of_a_language_model() -> None:
    plain, alone = both("zero3", None, reference=False)
    assert alone.known_memory == plain.known_memory
    assert alone.time == plain.time
    assert alone.traffic == plain.traffic


@pytest.mark.parametrize("kind", ["zero3", "zero2", "ddp", "zero3:4"])
@pytest.mark.parametrize("adapter", [None, LORA])
def test_nothing_of_its_forward_stays(kind: str, adapter: Any) -> None:
    left = []
    for job in ({}, {"method": "dpo"}):
        run = run_of(kind, adapter, **job)
        units = units_of(run)
        sums: dict[str, float] = {}
        for event in unrolled(step_program(units, Configurations.of([run.strategy]))):
            if isinstance(event, Alloc):
                sums[event.term] = sums.get(event.term, 0.0) + float(event.bytes[0])
        sums.pop("reference", None)
        left.append({term: size for term, size in sums.items() if abs(size) > 0.5})
    assert left[0] == left[1]


def test_what_generation_takes_is_what_the_user_says() -> None:
    plain = estimate_run(run_of())
    grpo = estimate_run(run_of(method="grpo", generation_memory="24GiB"))
    assert grpo.known_memory.terms["generation"] == 24 * GIB
    more = grpo.known_memory.peak_allocated_bytes - plain.known_memory.peak_allocated_bytes
    assert more == 24 * GIB
    assert grpo.time == plain.time
    beta = estimate_run(run_of(method="grpo", generation_memory=0, reference=True))
    assert beta.known_memory.terms["reference"] > 0


@pytest.mark.parametrize(
    ("job", "named"),
    [({"method": "grpo"}, "generation_memory"), ({"reference": True}, "reference"),
     ({"method": "dpo", "generation_memory": 1}, "generation_memory"),
     ({"method": "ppo"}, "method")],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused(job: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError, match=named):
        run_of(**job)


def test_half_a_pair_is_refused() -> None:
    run = run_of(method="dpo")
    with pytest.raises(SpecError, match="pairs"):
        run._replace(strategy=run.strategy.but(micro_batch=3)).resolved()


def test_the_trainer_refuses_what_it_does_not_train() -> None:
    with pytest.raises(SpecError, match=r"job\.method"):
        check_can_train(run_of(method="dpo"), DEVICES, DEVICES)
