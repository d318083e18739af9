"""Runs with adapters: trained, killed and resumed, and handed over to peft and transformers."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.command import COMMAND, PATIENCE_S, environment, shardwise
from tests.distributed.runs import NOT_OURS, losses, train, write
from tests.distributed.workers import Workers
from tests.gate import first_in_gate

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")
import peft
import torch
import transformers

from shardwise.checkpoint.export.tensor_reader import TensorReader
from shardwise.checkpoint.format.folder import find_folder
from shardwise.checkpoint.verify.opened import open_checkpoint
from tests.distributed.train_run import run_toml

TRAIN = 'checkpoint = {{ every = {every} }}\nschedule = "constant"\nmeasure = false'
ADAPTERS = {
    "fp32": '[adapter]\nrank = 4\nbase = "fp32"\ndropout = 0.1\ntrain = ["norm"]',
    "bf16": "[adapter]\nrank = 4\ndora = true",
    "nf4": '[adapter]\nrank = 4\nbase = "nf4"\ndropout = 0.1',
}
# Sizes of which each of two ranks holds full blocks of NF4.
LARGER = {"hidden = 64": "hidden = 256", "ffn = 96": "ffn = 512"}
PRETRAINED = """
cluster = "1x2xCPU"
model = {{ config = "base", pretrained = true }}
job = {{ seq_len = 32, global_batch = 256 }}
strategy = {{ kind = "zero3", micro_batch = 4, param_dtype = "{dtype}" }}

[train]
steps = {steps}
learning_rate = 1e-2
checkpoint = {{ every = 2 }}
measure = false
trackers = []

[adapter]
{adapter}
"""


def tensors_of(folder: Path) -> dict[str, Any]:
    """The tensors of the last checkpoint but those of single ranks."""
    checkpoint = find_folder(str(max((folder / "runs" / "it").glob("**/step-*"))))
    saved = open_checkpoint(checkpoint)
    with TensorReader(saved) as reader:
        return {name: reader.read(name) for name in saved.tensors if not name.startswith("rank.")}


def assert_same_run(one: Path, other: Path) -> dict[str, Any]:
    expected, found = tensors_of(one), tensors_of(other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    return found


def write_adapted(folder: Path, base: str, steps: int, every: int) -> Path:
    file = write(
        folder, steps=steps, log_every=1, train=TRAIN.format(every=every), data=ADAPTERS[base],
        dtype="bf16" if base == "nf4" else base,
    )  # fmt: skip
    if base == "nf4":
        text = file.read_text()
        for small, large in LARGER.items():
            assert small in text
            text = text.replace(small, large)
        file.write_text(text)
    return file


@pytest.mark.parametrize("base", first_in_gate(1, [*ADAPTERS]))
def test_a_resumed_run_is_equal_to_the_bit(base: str, tmp_path: Path, workers: Workers) -> None:
    # On a CPU steps of QLoRA are slow.
    half = 2 if base == "nf4" else 4
    for folder, ends in (("whole", (2 * half,)), ("resumed", (half, 2 * half))):
        (tmp_path / folder).mkdir()
        for steps in ends:
            file = write_adapted(tmp_path / folder, base, steps, every=half)
            [ranks] = workers.run(run_toml, 2, [{"file": str(file)}])
            assert [rank.get("steps") for rank in ranks] == [steps] * 2, ranks
    assert len(losses(tmp_path / "whole")) == 2 * half
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")
    tensors = assert_same_run(tmp_path / "whole", tmp_path / "resumed")
    # Only what is trained is saved.
    weights = [name for name in tensors if name.startswith("model.")]
    assert weights
    assert all(".lora_" in name or "norm" in name for name in weights)


@pytest.mark.nightly
@pytest.mark.parametrize("base", ["fp32", "nf4"])
def test_a_killed_run_loses_nothing(base: str, tmp_path: Path) -> None:
    from shardwise.launch.launcher import kill_tree

    text = write_adapted(tmp_path, base, steps=40, every=2).read_text()
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.toml").write_text(text)
    train(tmp_path / "whole" / "run.toml", "--nproc", "2")
    file = tmp_path / "killed" / "run.toml"
    words = ("train", str(file), "--name", "it", "--nproc", "2")
    process = subprocess.Popen([*COMMAND, *words], cwd=file.parent, env=environment(),
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    deadline = time.monotonic() + PATIENCE_S
    while not list(file.parent.glob("runs/it/**/step-*/manifest.json")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    kill_tree(process.pid)
    process.wait()
    assert int(max(file.parent.glob("runs/it/**/step-*")).name[5:13]) < 40
    train(file, "--nproc", "2", "--resume")
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def pretrained(folder: Path, seed: int = 0, hidden: int = 64, ffn: int = 96) -> Any:
    """A tiny model saved as transformers saves one."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=hidden, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=ffn, vocab_size=101, max_position_embeddings=64,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder / "base")
    return model.eval()


def trained(folder: Path, workers: Workers, adapter: str, dtype: str = "fp32") -> Path:
    file = folder / "run.toml"
    file.write_text(PRETRAINED.format(steps=4, adapter=adapter, dtype=dtype))
    [ranks] = workers.run(run_toml, 2, [{"file": str(file)}])
    assert [rank.get("steps") for rank in ranks] == [4, 4], ranks
    return file


def export(folder: Path, *options: str, code: int = 0) -> str:
    done = shardwise("export-weights", "runs/it", *options, folder=folder)
    assert done.returncode == code, done.stdout + done.stderr
    assert not NOT_OURS.search(done.stderr), done.stderr
    return done.stdout + done.stderr


def logits(model: Any) -> Any:
    ids = torch.randint(0, 101, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def with_trained_tensors(folder: Path, base: Any, adapter: str) -> Any:
    """The trained model, from the checkpoint and without the export."""
    import tomllib

    from shardwise.pytorch.adapted import adapt
    from shardwise.spec.adapter import read_adapter

    model = adapt(base, read_adapter(tomllib.loads(f"[adapter]\n{adapter}")["adapter"]))
    weights = {
        name.removeprefix("model."): tensor
        for name, tensor in tensors_of(folder).items()
        if name.startswith("model.")
    }
    assert not model.load_state_dict(weights, strict=False).unexpected_keys
    return model


LORA = 'rank = 4\nbase = "fp32"'


@pytest.mark.parametrize(
    "adapter",
    [
        f'{LORA}\ntargets = ["q_proj", "v_proj"]\nrslora = true',
        *(
            pytest.param(f"{LORA}{more}", marks=pytest.mark.nightly)
            for more in ("", "\ndora = true", '\ntrain = ["lm_head", "norm"]')
        ),
    ],
)
def test_peft_loads_an_exported_adapter(adapter: str, tmp_path: Path, workers: Workers) -> None:
    base = pretrained(tmp_path)
    trained(tmp_path, workers, adapter)
    said = export(tmp_path, "--output", "adapter")
    assert "PeftModel.from_pretrained" in said
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8)
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    found = logits(loaded)
    expected = logits(with_trained_tensors(tmp_path, pretrained(tmp_path), adapter))
    assert torch.equal(found, expected)
    assert not torch.equal(expected, logits(pretrained(tmp_path)))

    export(tmp_path, "--output", "merged", "--merge")
    merged = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "merged"))
    assert merged.dtype == torch.float32
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_a_merged_model_keeps_the_dtype_of_its_base(tmp_path: Path, workers: Workers) -> None:
    pretrained(tmp_path)
    trained(tmp_path, workers, "rank = 4", "bf16")
    export(tmp_path, "--output", "merged", "--merge")
    merged = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "merged"))
    assert merged.dtype == torch.bfloat16
    base = pretrained(tmp_path).to(torch.bfloat16).float()
    expected = logits(with_trained_tensors(tmp_path, base, "rank = 4"))
    # Weights of bf16 have 8 bits.
    error = (logits(merged.float()) - expected).norm() / expected.norm()
    assert error < 2**-7


@pytest.mark.nightly
def test_qlora_is_merged_into_the_weights_it_was_trained_with(
    tmp_path: Path, workers: Workers
) -> None:
    """Those are the quantised ones, turned into bf16: not the pretrained ones."""
    from shardwise.engine.adapter import to_nf4

    def quantised() -> Any:
        model = pretrained(tmp_path, hidden=256, ffn=512).to(torch.bfloat16)
        for layer in model.model.layers.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.weight.data = to_nf4(layer.weight.data).to(torch.bfloat16)
        return model.float()

    pretrained(tmp_path, hidden=256, ffn=512)
    adapter = 'rank = 4\nbase = "nf4"'
    trained(tmp_path, workers, adapter, "bf16")
    expected = logits(with_trained_tensors(tmp_path, quantised(), adapter))

    said = export(tmp_path, "--output", "adapter")
    assert "PeftModel.from_pretrained" in said
    loaded = peft.PeftModel.from_pretrained(quantised(), str(tmp_path / "adapter"))
    assert torch.equal(logits(loaded), expected)

    said = export(tmp_path, "--output", "merged", "--merge")
    assert "NF4" in said
    merged = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "merged"))
    assert merged.dtype == torch.bfloat16

    def error(base: Any) -> float:
        return float((logits(merged.float()) - base).norm() / base.norm())

    assert error(expected) < 2**-7
    # Merged into the pretrained weights, it would be another model.
    other = pretrained(tmp_path, hidden=256, ffn=512).to(torch.bfloat16).float()
    assert error(logits(with_trained_tensors(tmp_path, other, adapter))) > 2**-5


@pytest.mark.nightly
def test_parameters_trained_in_full_are_exported_by_merging(
    tmp_path: Path, workers: Workers
) -> None:
    pretrained(tmp_path)
    adapter = 'train = ["layers.1."]\nbase = "fp32"'
    trained(tmp_path, workers, adapter)
    assert "use --merge" in export(tmp_path, "--output", "merged", code=2)
    export(tmp_path, "--output", "merged", "--merge")
    merged = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "merged"))
    expected = logits(with_trained_tensors(tmp_path, pretrained(tmp_path), adapter))
    assert torch.equal(logits(merged), expected)


@pytest.mark.nightly
def test_another_base_and_another_adapter_are_refused(tmp_path: Path, workers: Workers) -> None:
    pretrained(tmp_path)
    file = trained(tmp_path, workers, LORA)
    text = file.read_text().replace("steps = 4", "steps = 6")
    file.write_text(text.replace("rank = 4", "rank = 4\nalpha = 2"))
    [ranks] = workers.run(run_toml, 2, [{"file": str(file)}])
    assert all(rank["refused"].startswith("adapter: was ") for rank in ranks)
    pretrained(tmp_path, seed=1)
    file.write_text(text)
    [ranks] = workers.run(run_toml, 2, [{"file": str(file)}])
    assert all("frozen weights differ" in rank["refused"] for rank in ranks)
    assert "frozen weights differ" in export(tmp_path, "--output", "merged", "--merge", code=2)
