"""The words of `states` and `offload` in [strategy] and on the command line."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.spec.record import SpecError
from shardwise.spec.run import read_run, run_from_dict, write_run
from shardwise.spec.states import offloaded_parts
from shardwise.spec.strategy import Strategy

LEAST: dict[str, Any] = {"model": "llama-3-8b", "cluster": "8xH100-SXM"}


def read(**fields: object) -> Strategy:
    return Strategy.read({"kind": "zero3", **fields}, where="strategy")


@pytest.mark.parametrize(
    ("states", "master"), [("fp32", "fp32"), ("bf16", "bf16"), ("bf16+stochastic", "bf16")]
)
def test_states_set_the_master_dtype(states: str, master: str, tmp_path: Any) -> None:
    strategy = read(states=states)
    assert strategy.master_dtype == master
    assert (strategy.states is not None) == (states == "bf16+stochastic")
    # Written and read again.
    run = run_from_dict({**LEAST, "strategy": {"kind": "zero3", "states": states}}).resolved()
    file = tmp_path / "run.toml"
    file.write_text(write_run(run))
    assert read_run(file) == run


@pytest.mark.parametrize(
    ("given", "canonical", "parts"),
    [
        (False, False, ()),
        ("none", False, ()),
        ([], False, ()),
        (True, True, ("parameters",)),
        ("parameters", True, ("parameters",)),
        (["optimizer", "parameters"], True, ("parameters",)),
        ("optimizer", "optimizer", ("optimizer",)),
        (["activations", "optimizer"], "optimizer+activations", ("optimizer", "activations")),
        ("activations,parameters", "parameters+activations", ("parameters", "activations")),
    ],
)
def test_offload_is_a_flag_a_word_or_several(
    given: object, canonical: bool | str, parts: tuple[str, ...]
) -> None:
    strategy = read(offload=given, recompute="full")
    assert strategy.offload == canonical
    assert offloaded_parts(strategy.offload) == parts
    assert strategy.but(micro_batch=2).offload == canonical


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"states": "bf17"}, "'bf17' is not one of fp32, bf16, bf16+stochastic"),
        ({"states": "bf16", "master_dtype": "fp32"}, "leave master_dtype out"),
        ({"states": "bf16+stochastic", "tensor": 2}, "tensor parallelism"),
        ({"offload": "optimiser"}, "did you mean 'optimizer'?"),
        ({"offload": 3}, "one or more of optimizer, parameters, activations"),
        ({"offload": "optimizer", "context": 2}, "only parameters can be offloaded"),
        ({"offload": "activations", "recompute": "selective"}, "none, full or a share"),
        ({"kind": "single", "offload": "activations"}, "recompute full"),
        ({"offload": "activations", "compile": True}, "compile"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(SpecError) as refused:
        read(**fields)
    assert problem in str(refused.value)


def test_an_offloaded_optimizer_leaves_weights_of_the_compute_dtype_on_the_device() -> None:
    assert read(offload="optimizer").kept_dtype == "bf16"
    assert read(offload=True).kept_dtype == "fp32"
    alone = Strategy.read({"kind": "single", "offload": "optimizer"})
    assert (alone.autocast, alone.but(offload=False).autocast) == (False, True)
