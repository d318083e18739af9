"""A fused loss in the files of other stacks: there and back, read from real files, and searched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.planning.api import plan
from shardwise.spec.run import RunSpec
from shardwise.stacks.limits import StackLimits
from shardwise.stacks.read import axolotl, llama_factory, trainer
from shardwise.stacks.read.imports import import_file
from shardwise.stacks.write.differences import changed_fields
from shardwise.stacks.write.exports import STACKS, export_run
from tests.stacks.runs import large

LOSSES = ("plain", "chunked", "fused")
LIGER = "axolotl.integrations.liger.LigerPlugin"
CUT = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
# The keys that each stack reads, checked against axolotl 0.19, LLaMA-Factory 0.9.5 and
# transformers 5.22.
KEYS: dict[tuple[str, str], dict[str, Any]] = {
    ("axolotl", "liger"): {"plugins": [LIGER], "liger_fused_linear_cross_entropy": True},
    ("axolotl", "cut_cross_entropy"): {"plugins": [CUT], "cut_cross_entropy": True},
    ("llama-factory", "liger"): {"enable_liger_kernel": True},
    ("trainer", "liger"): {"use_liger_kernel": True},
}


# These run other models' losses, or Shardwise's own trainer.
WITHOUT = ("megatron-bridge", "slurm", "kubernetes")
CHUNKS = ("trl", "torchtitan", "python", "lightning")


def fused(kernel: str = "liger", **sections: Any) -> RunSpec:
    strategy = {"kind": "zero3", "reduce_dtype": "bf16", "loss": "fused", "loss_kernel": kernel}
    return large(strategy=strategy, **sections)


@pytest.mark.parametrize(("stack", "kernel"), KEYS)
def test_a_kernel_comes_back(stack: str, kernel: str, tmp_path: Path) -> None:
    run = fused(kernel)
    written = export_run(run, stack)
    table = yaml.safe_load(written.text)
    assert {key: table.get(key) for key in KEYS[stack, kernel]} == KEYS[stack, kernel]
    assert not {"loss", "loss_kernel"} & set(changed_fields(run.strategy, written.applied))
    file = tmp_path / written.name
    file.write_text(written.text)
    back = import_file(file).strategy
    assert (back["loss"], back["loss_kernel"]) == ("fused", kernel)


@pytest.mark.parametrize("stack", [name for name in STACKS if name not in WITHOUT])
@pytest.mark.parametrize("kernel", ["liger", "cut_cross_entropy"])
def test_other_stacks_change_the_loss_and_say_so(stack: str, kernel: str) -> None:
    if (stack, kernel) in KEYS:
        return
    run = fused(kernel)
    written = export_run(run, stack)
    assert written.applied.loss == ("plain" if stack not in CHUNKS else "chunked")
    assert any(sentence.startswith("loss = fused") for sentence in written.unsupported)
    # Nothing of the kernel is left in the file.
    assert "liger" not in written.text.lower()


@pytest.mark.parametrize("stack", ["axolotl", "llama-factory", "trainer"])
@pytest.mark.parametrize("model", ["gpt2", "pythia-1.4b"])
def test_models_without_these_kernels_stay_plain(stack: str, model: str) -> None:
    run = large(model=model, strategy={"kind": "zero3", "loss": "fused"}, job={"seq_len": 1024})
    assert export_run(run, stack).applied.loss == "plain"


def given(found: Any) -> tuple[Any, Any]:
    return found.strategy.get("loss", "plain"), found.strategy.get("loss_kernel")


AXOLOTL = {"base_model": "m", "micro_batch_size": 1, "learning_rate": 1e-5, "bf16": True}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"plugins": [LIGER], "liger_fused_linear_cross_entropy": True}, ("fused", "liger")),
        ({"plugins": [LIGER], "liger_rms_norm": True}, ("plain", None)),
        ({"liger_fused_linear_cross_entropy": True}, ("plain", None)),
        # The plugin alone is enough.
        ({"plugins": [CUT]}, ("fused", "cut_cross_entropy")),
        ({"plugins": [CUT], "cut_cross_entropy": False}, ("plain", None)),
        ({"cut_cross_entropy": True}, ("plain", None)),
    ],
)
def test_axolotl_needs_the_plugin(keys: dict[str, Any], expected: tuple[str, str]) -> None:
    found = axolotl.read({**AXOLOTL, **keys})
    assert given(found) == expected
    lost = {one.key for one in found.outcomes if one.is_lost}
    assert ("liger_*" in lost) == ("liger_rms_norm" in keys)
    ignored = expected[0] == "plain" and True in keys.values() and "plugins" not in keys
    assert bool(lost & {"liger_fused_linear_cross_entropy", "cut_cross_entropy"}) == ignored
    assert "plugins" not in lost
    other = axolotl.read({**AXOLOTL, **keys, "plugins": ["a.b.Plugin"]})
    assert "plugins" in {one.key for one in other.outcomes if one.is_lost}


def test_the_trainers_key_and_its_configuration() -> None:
    arguments = {"per_device_train_batch_size": 1, "use_liger_kernel": True}
    assert given(trainer.read(arguments)) == ("fused", "liger")
    without = {**arguments, "liger_kernel_config": {"fused_linear_cross_entropy": False}}
    assert given(trainer.read(without)) == ("plain", None)
    assert given(llama_factory.read({"stage": "sft", "enable_liger_kernel": True}))[0] == "fused"


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_trl_keeps_its_own_head(smoothing: float) -> None:
    """TRL 1.16 leaves Liger's loss out: it would replace the fused head that TRL has."""
    found = trainer.read_trl(
        {"packing": True, "use_liger_kernel": True, "label_smoothing_factor": smoothing}
    )
    assert given(found) == ("plain" if smoothing else "chunked", None)
    assert not any(one.fields.get("loss") == "fused" for one in found.outcomes)
    assert [one.key for one in found.outcomes if one.key == "use_liger_kernel" and one.is_lost]


@pytest.mark.parametrize(
    ("stack", "losses"),
    [
        ("axolotl", ("plain", "fused")),
        ("trainer", ("plain", "fused")),
        ("llama-factory", ("plain", "fused")),
        ("trl", ("chunked",)),
        ("torchtitan", ("plain", "chunked")),
        ("python", ("plain", "chunked")),
        ("accelerate", ("plain",)),
    ],
)
def test_the_losses_that_a_plan_may_choose(stack: str, losses: tuple[str, ...]) -> None:
    assert StackLimits(large(), stack).choices("loss", LOSSES) == losses


@pytest.mark.parametrize("stack", ["axolotl", "trainer"])
def test_an_8b_model_at_8k_needs_no_tensor_parallelism(stack: str) -> None:
    found = plan("llama-3-8b", "8xH100-SXM", seq_len=8192, for_stack=stack)
    assert found.winner is not None
    strategy = found.winner.strategy
    assert (strategy.loss, strategy.tensor) == ("fused", 1)
    assert any(reason.kind == "fused loss" for reason in found.why)


def test_our_own_plan_has_no_loss_that_needs_a_package() -> None:
    found = plan("llama-3-8b", "8xH100-SXM", seq_len=8192)
    assert found.winner is not None
    assert found.winner.strategy.loss == "chunked"
    asked = plan("llama-3-8b", "8xH100-SXM", seq_len=8192, loss="fused")
    assert asked.winner is not None
    assert asked.winner.strategy.loss == "fused"
