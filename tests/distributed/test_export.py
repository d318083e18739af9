"""`shardwise export-weights` of a real run: whoever loads it has the model that was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.spec.run import read_run
from tests.command import shardwise
from tests.distributed.runs import RUN, write
from tests.distributed.workers import Workers

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")

from shardwise.checkpoint.export.weights import NotExportedError, export_first  # noqa: E402
from shardwise.checkpoint.format.storage import LocalStorage  # noqa: E402
from shardwise.pytorch.build import build_module  # noqa: E402
from tests.distributed.train_run import run_toml  # noqa: E402

SAVING = "trackers = []\nmeasure = false\ncheckpoint = { every = 4, keep = 2 }"
TIED = RUN.replace("max_positions = 64", "max_positions = 64\ntied = true")
EXPERTS = RUN.replace('family = "llama"', 'family = "mixtral"\nexperts = 3\nexperts_per_token = 2')
TOKENS = torch.arange(64).reshape(2, 32) * 3 % 256


def assembled(checkpoint: Path) -> dict[str, Any]:
    """The model's tensors by what the header of every rank's file says, and nothing else."""
    boxes: dict[str, list[tuple[list[int], Any]]] = {}
    for file in sorted(checkpoint.glob("rank-*.safetensors")):
        with safetensors.safe_open(file, framework="pt") as opened:
            places = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
            for name in opened.keys():  # noqa: SIM118
                if name.startswith("model."):
                    plain = name.removeprefix("model.").partition("@")[0]
                    offsets = places[name]["saved_offsets"]
                    boxes.setdefault(plain, []).append((offsets, opened.get_tensor(name)))
    found = {}
    for name, parts in boxes.items():
        ends = [[o + n for o, n in zip(at, part.shape, strict=True)] for at, part in parts]
        found[name] = torch.full([max(axis) for axis in zip(*ends, strict=True)], torch.nan)
        for at, part in parts:
            place = tuple(slice(o, o + n) for o, n in zip(at, part.shape, strict=True))
            found[name][place] = part
    return found


def trained(run: Path, step: int) -> Any:
    """The module of a run as it was at a step."""
    module = build_module(read_run(run / "run.toml").model).eval()
    weights = assembled(run / "checkpoints" / f"step-{step:08d}")
    missing, unexpected = module.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied: the embedding is there
    return module


def loaded(folder: Path) -> Any:
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(TOKENS).logits


def break_weight(checkpoint: Path, file: str) -> None:
    """Change one byte of the first weight in a rank's file."""
    data = bytearray((checkpoint / file).read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    starts = [header[name]["data_offsets"][0] for name in header if name.startswith("model.")]
    data[begin + min(starts)] ^= 1
    (checkpoint / file).write_bytes(data)


def test_transformers_computes_what_was_trained(tmp_path: Path, workers: Workers) -> None:
    file = write(tmp_path, TIED, train=SAVING)
    [[done, _]] = workers.run(run_toml, 2, [{"file": str(file)}])
    assert done["steps"] == 8
    run = tmp_path / "runs" / "it"
    done = shardwise(
        "export-weights", "runs/it", "-o", "out", "--shard-size", "100kB", "--json", folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["step"], told["tensors"], told["dtypes"]) == (8, 29, ["float32"])
    assert len(told["files"]) > 4
    module, model = trained(run, 8), loaded(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(logits(model), logits(module))
    # No weight that rounding would have left as it is.
    assert all((p.bfloat16().float() != p).float().mean() > 0.9 for p in module.parameters())

    place = LocalStorage(run / "checkpoints")
    export_first([place.folder(4)], tmp_path / "half", "bf16")
    half, before = loaded(tmp_path / "half"), trained(run, 4)
    assert half.dtype == torch.bfloat16
    for name, parameter in before.named_parameters():
        assert torch.equal(half.get_parameter(name), parameter.bfloat16()), name

    break_weight(run / "checkpoints" / "step-00000008", "rank-00001.safetensors")
    with pytest.raises(NotExportedError, match=r"step-00000008: rank-00001.safetensors: model\."):
        export_first([place.folder(8)], tmp_path / "broken")
    older = export_first([place.folder(8), place.folder(4)], tmp_path / "older")
    assert (older.step, older.tensors, older.bytes, len(older.skipped)) == (4, 29, 485_120, 1)
    assert torch.equal(logits(loaded(tmp_path / "older")), logits(before))
    folders = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert folders == ["half", "older", "out", "runs"]


@pytest.mark.nightly
def test_experts_divided_along_another_dimension_are_exported(
    tmp_path: Path, workers: Workers
) -> None:
    """Three experts over two processes: pieces along dimension 1."""
    file = write(tmp_path, EXPERTS, train=SAVING, steps=4)
    workers.run(run_toml, 2, [{"file": str(file)}])
    checkpoint = tmp_path / "runs" / "it" / "checkpoints" / "step-00000004"
    told = json.loads((checkpoint / "layout.json").read_text())
    rules = {number for _, _, shape, number, _ in told["tensors"] if len(shape) == 3}
    # Dimension 1, in two parts, of ranks that follow each other.
    assert [told["axes"][number] for number in rules] == [[[1, 2, 1]]]
    checked = shardwise("fsck", "runs/it", folder=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    exported = shardwise("export-weights", "runs/it", "-o", "out", folder=tmp_path)
    assert exported.returncode == 0, exported.stderr
    model = loaded(tmp_path / "out")
    for name, tensor in assembled(checkpoint).items():
        assert torch.equal(model.get_parameter(name), tensor), name


@pytest.mark.nightly
def test_divided_experts_are_exported(tmp_path: Path, workers: Workers) -> None:
    """Each of two processes has two of the four experts."""
    text = EXPERTS.replace("experts = 3", "experts = 4")
    file = write(tmp_path, text, train=SAVING, steps=4, strategy="expert = 2")
    workers.run(run_toml, 2, [{"file": str(file)}])
    exported = shardwise("export-weights", "runs/it", "-o", "out", folder=tmp_path)
    assert exported.returncode == 0, exported.stderr
    model = loaded(tmp_path / "out")
    weights = assembled(tmp_path / "runs" / "it" / "checkpoints" / "step-00000004")
    stacked = [name for name, tensor in weights.items() if tensor.ndim == 3]
    assert len(stacked) == 2 * 3
    for name, tensor in weights.items():
        assert torch.equal(model.get_parameter(name), tensor), name
