"""Weights of a checkpoint as a Hugging Face folder: the same numbers, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file

from shardwise.checkpoint.export.weights import (  # noqa: E402
    ExportedWeights,
    NotExportedError,
    export_first,
    shards_of,
)
from shardwise.checkpoint.foreign.safetensors import check_safetensors  # noqa: E402
from shardwise.checkpoint.format import manifest  # noqa: E402
from shardwise.checkpoint.format.folder import LocalFolder  # noqa: E402
from shardwise.checkpoint.format.manifest import Manifest, read_manifest, write_manifest  # noqa: E402
from shardwise.checkpoint.format.pieces import Part, Piece, Tensor  # noqa: E402
from shardwise.checkpoint.format.sharding import full_box as all_of  # noqa: E402
from shardwise.checkpoint.verify.opened import open_checkpoint  # noqa: E402
from shardwise.cli.export_weights import export_weights  # noqa: E402
from shardwise.pytorch.build import build_module  # noqa: E402
from shardwise.spec.record import SpecError  # noqa: E402
from tests.checkpoint.ours import (  # noqa: E402
    Array,
    crc32_of_blocks,
    index_v1,
    named,
    write_ours,
)

RANDOM = np.random.default_rng(0)
WEIGHTS: dict[str, Array] = {
    "model.embed.weight": RANDOM.normal(size=(50, 6)).astype(np.float32),
    "model.block.weight": RANDOM.normal(size=(7, 5, 3)).astype(np.float32),
    "model.block.seen": np.array([3, 2**40 + 1]),
    "model.none": np.zeros((0, 4), np.float32),
}
OTHERS: dict[str, Array] = {
    "optimizer.embed.weight.exp_avg": RANDOM.normal(size=(50, 6)).astype(np.float32),
    "rank.0.random.cpu": np.arange(10, dtype=np.uint8),
}
TINY: dict[str, str | int] = {
    "name": "tiny", "layers": 2, "hidden": 16, "heads": 2, "ffn": 24, "vocab": 32,
    "max_positions": 16,
}  # fmt: skip


def checkpoint(folder: Path, step: int = 10, files: int = 3) -> LocalFolder:
    path = folder / f"step-{step:08d}"
    write_ours(path, {**WEIGHTS, **OTHERS}, files, step)
    return LocalFolder(path)


def of_run(folder: LocalFolder, run: Mapping[str, Any]) -> None:
    """Let a checkpoint say it is of this run."""
    file = folder.path / manifest.NAME
    file.write_bytes(write_manifest(read_manifest(file.read_bytes()).but(run=dict(run))))


def export(folder: LocalFolder, to: Path, **options: Any) -> ExportedWeights:
    return export_first([folder], to, **options)


def break_tensor(folder: LocalFolder, name: str) -> str:
    """Change a byte of a tensor's last piece; returns the file it is in."""
    saved = open_checkpoint(folder)
    piece = saved.pieces(name, all_of(saved.tensors[name].shape))[-1]
    data = bytearray((folder.path / piece.file).read_bytes())
    data[piece.start] ^= 1
    (folder.path / piece.file).write_bytes(data)
    return piece.file


def beside(to: Path) -> list[str]:
    return sorted(path.name for path in to.parent.iterdir())


def test_pieces_become_tensors_and_only_weights_are_written(tmp_path: Path) -> None:
    done = export(checkpoint(tmp_path), tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {f"model.{name}" for name in found} == set(WEIGHTS)
    for name, array in WEIGHTS.items():
        ours = found[name.removeprefix("model.")].numpy()
        assert ours.dtype == array.dtype
        np.testing.assert_array_equal(ours, array)
    assert (done.step, done.tensors, done.files) == (10, 4, ("model.safetensors",))
    assert done.bytes == sum(array.nbytes for array in WEIGHTS.values())
    # Nothing else: the checkpoint does not say which model it is of.
    assert beside(tmp_path / "out" / "any") == ["model.safetensors"]
    assert done.no_config


def test_pieces_may_be_cut_along_any_axis(tmp_path: Path) -> None:
    whole = RANDOM.normal(size=(6, 8)).astype(np.float32)
    data, pieces = b"", []
    for rows, columns in ((0, 0), (0, 5), (4, 0), (4, 5)):
        part = whole[rows : 4 if rows == 0 else 6, columns : 5 if columns == 0 else 8]
        crc = crc32_of_blocks(part.tobytes())
        place = ("all.safetensors", len(data), part.nbytes)
        pieces.append(Piece("model.a", (rows, columns), part.shape, *place, crc))
        data += part.tobytes()
    folder = LocalFolder(tmp_path / "step-00000001")
    folder.path.mkdir()
    table = index_v1([Tensor("model.a", "float32", whole.shape)], pieces)
    records = (
        named(folder.path / "tensors.json", table),
        named(folder.path / pieces[0].file, data),
    )
    told = Manifest(version=1, step=1, world=4, sequences=0, run={}, versions={}, files=records)
    (folder.path / manifest.NAME).write_bytes(write_manifest(told))
    export(folder, tmp_path / "out")
    np.testing.assert_array_equal(load_file(tmp_path / "out" / "model.safetensors")["a"], whole)


def test_shards_are_no_larger_than_asked_for_and_indexed(tmp_path: Path) -> None:
    done = export(checkpoint(tmp_path), tmp_path / "out", shard_size=430)
    assert len(done.files) == 3
    table = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert table["metadata"]["total_size"] == done.bytes
    found: dict[str, Any] = {}
    for number, file in enumerate(done.files, 1):
        assert file == f"model-{number:05d}-of-00003.safetensors"
        held = load_file(tmp_path / "out" / file)
        assert all(table["weight_map"][name] == file for name in held)
        found |= held
    assert set(found) == set(table["weight_map"])
    for name, array in WEIGHTS.items():
        np.testing.assert_array_equal(found[name.removeprefix("model.")].numpy(), array)
    checked = check_safetensors(LocalFolder(tmp_path / "out"))
    assert [one.severity for one in checked.findings] == ["unverifiable"]


def test_a_tensor_is_never_cut_between_files() -> None:
    parts = [Part(str(size), "uint8", (0,), (size,)) for size in (30, 70, 1, 250, 99, 1, 1)]
    sizes = [[part.length for part in shard] for shard in shards_of(parts, 100).values()]
    assert sizes == [[30, 70], [1], [250], [99, 1], [1]]


def test_numbers_are_converted_and_counts_are_not(tmp_path: Path) -> None:
    done = export(checkpoint(tmp_path), tmp_path / "out", dtype="bf16", shard_size=300)
    assert done.dtypes == ("bfloat16", "int64")
    found: dict[str, Any] = {}
    for file in done.files:
        found |= load_file(tmp_path / "out" / file)
    for name, array in WEIGHTS.items():
        expected = torch.from_numpy(array)
        if array.dtype == np.float32:
            expected = expected.to(torch.bfloat16)
        got = found[name.removeprefix("model.")]
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


def test_what_does_not_fit_a_dtype_is_refused(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path / "step-00000001")
    values = np.array([1.0, -1e5, np.inf], np.float32)
    write_ours(folder.path, {"model.large": values})
    with pytest.raises(SpecError, match=r"large contains 1e\+05, which overflows float16"):
        export(folder, tmp_path / "out", dtype="fp16")
    assert beside(tmp_path / "out") == ["step-00000001"]
    export(folder, tmp_path / "out", dtype="bf16")


def test_a_byte_that_changed_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    file = break_tensor(folder, "model.block.weight")
    with pytest.raises(NotExportedError) as caught:
        export(folder, tmp_path / "out")
    (problem,) = caught.value.problems
    # Seven rows in three parts are 3, 3 and 1.
    assert problem.startswith(f"step-00000010: {file}: model.block.weight at [6, 0, 0]: ")
    assert beside(tmp_path / "out") == ["step-00000010"]


def test_a_change_in_what_is_not_exported_does_not_matter(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    break_tensor(folder, "optimizer.embed.weight.exp_avg")
    assert export(folder, tmp_path / "out").tensors == 4


def test_the_one_before_is_taken_and_told(tmp_path: Path) -> None:
    old, new, newest = (checkpoint(tmp_path, step) for step in (10, 20, 30))
    (newest.path / "rank-00000.safetensors").unlink()
    file = break_tensor(new, "model.embed.weight")
    done = export_first([newest, new, old], tmp_path / "out")
    assert done.step == 10
    missing, changed = done.skipped
    assert missing == "step-00000030: rank-00000.safetensors is missing"
    assert changed.startswith(f"step-00000020: {file}: model.embed.weight")
    with pytest.raises(NotExportedError) as caught:
        export_first([newest, new], tmp_path / "other")
    assert caught.value.problems == [missing, changed]


def test_a_folder_with_anything_in_it_is_left_alone(tmp_path: Path) -> None:
    folder, to = checkpoint(tmp_path), tmp_path / "out"
    to.mkdir()
    (tmp_path / "out.unfinished").mkdir()
    (tmp_path / "out.unfinished" / "model.safetensors").write_bytes(b"of one that was killed")
    export(folder, to)
    before = (to / "model.safetensors").stat()
    with pytest.raises(SpecError, match="not empty"):
        export(folder, to)
    with pytest.raises(SpecError, match="does not exist"):
        export(folder, tmp_path / "no" / "such")
    assert (to / "model.safetensors").stat() == before
    assert beside(to) == ["out", "step-00000010"]


FAMILIES: dict[str, dict[str, str | int]] = {
    "llama": {"family": "llama"},
    "llama, tied": {"family": "llama", "tied": True},
    "gpt2": {"family": "gpt2"},
    "gemma": {"family": "gemma"},
    "mixtral": {"family": "mixtral", "experts": 4, "experts_per_token": 2},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_it_with_every_tie(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from shardwise.checkpoint.dcp.state import buffers_of, parameters_of
    from shardwise.spec.model import ModelSpec

    torch.manual_seed(0)
    spec = ModelSpec.read({**TINY, **FAMILIES[family]}, where="model")
    built = build_module(spec).eval()
    state = {f"model.{name}": p.detach() for name, p in parameters_of(built).items()}
    state |= buffers_of(built)
    folder = LocalFolder(tmp_path / "step-00000001")
    write_ours(folder.path, {name: tensor.numpy() for name, tensor in state.items()})
    of_run(folder, {"model": spec.model_dump(mode="json", exclude_none=True)})
    done = export(folder, tmp_path / "out", shard_size=4300)
    assert not done.no_config
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.use_cache
    assert len(list(model.parameters())) == len(list(built.parameters()))
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, built(tokens).logits)


def test_another_model_than_was_saved_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = checkpoint(tmp_path)
    of_run(folder, {"model": {**TINY, "family": "llama"}})
    with pytest.raises(SpecError, match="is missing in the checkpoint and has shape"):
        export(folder, tmp_path / "out")
    assert beside(tmp_path / "out") == ["step-00000010"]


def test_a_model_of_code_has_no_config(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    of_run(folder, {"model": {"factory": "nobody.needs:this"}})
    done = export(folder, tmp_path / "out")
    assert "nobody.needs:this" in done.no_config


def test_a_config_that_is_gone_is_named(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    of_run(folder, {"model": {"config": "gone/config.json", "pretrained": False}})
    with pytest.raises(SpecError, match="gone/config.json does not exist"):
        export(folder, tmp_path / "out")


def command(*words: object) -> tuple[int, str, str]:
    """Exit code, what was printed and what was wrong, as the command line has them."""
    app = typer.Typer()
    app.command()(export_weights)
    done = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(done.exception, SpecError):
        return 2, done.stdout, str(done.exception)
    return done.exit_code, done.stdout, done.stderr


def test_a_step_may_be_chosen(tmp_path: Path) -> None:
    run = tmp_path / "run"
    old, new = (checkpoint(run / "checkpoints", step) for step in (10, 20))
    for number, (words, step) in enumerate(
        [((run,), 20), ((run, "--step", 10), 10), ((old.path,), 10), ((run / "checkpoints",), 20)]
    ):
        to = tmp_path / str(number)
        code, told, wrong = command(*words, "-o", to, "--json")
        assert (code, wrong) == (0, "")
        found = json.loads(told)
        assert (found["step"], found["folder"]) == (step, str(to))
    assert command(run, "-o", tmp_path / "out", "--step", 30)[2].endswith("use one of 10, 20")
    file = break_tensor(new, "model.embed.weight")
    code, told, wrong = command(run, "-o", tmp_path / "out", "--step", 20)
    assert (code, told) == (1, "")
    assert wrong.startswith(f"error: step-00000020: {file}: model.embed.weight")
    assert not (tmp_path / "out").exists()
    code, told, _ = command(run, "-o", tmp_path / "out")
    assert (code, told.splitlines()[0][:11]) == (0, "Skipped cor")


def test_what_cannot_be_exported_is_said_in_a_sentence(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path).path
    (tmp_path / "empty").mkdir()
    to = tmp_path / "out"
    for words, sentence in (
        ((tmp_path / "gone", "-o", to), "gone is not a folder"),
        ((tmp_path / "empty", "-o", to), "has no complete checkpoint"),
        ((folder, "-o", to, "--step", 11), "is a single checkpoint"),
        ((folder, "-o", folder), "is not empty"),
        ((folder, "-o", to, "--shard-size", "many"), "--shard-size: cannot read 'many'"),
    ):
        code, told, wrong = command(*words)
        assert (code, told) == (2, "")
        assert sentence in wrong
    assert not to.exists()
