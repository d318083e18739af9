from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec import catalogue
from shardwise.spec.record import SpecError
from shardwise.spec.run import read_run, replace_run, run_from_dict, run_table, write_run

SHORT = """
model = "llama-3-8b"
cluster = "4x8xH100-SXM@400Gbps"
strategy = "hsdp"
[job]
seq_len = 8192
global_batch = "4Mi"
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "run.toml"
    file.write_text(text)
    return file


def test_shorthands(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, SHORT)).resolved()
    assert run.model == catalogue.model("llama-3-8b")
    assert run.cluster.devices == 32
    assert (run.strategy.shard, run.strategy.replicate) == (8, 4)
    # 4 Mi tokens / (8192 tokens x 32 devices) = 16 micro-batches.
    assert run.strategy.accumulate == 16


@pytest.mark.parametrize(
    ("old", "kept"),
    [
        ("#:schema ./run.schema.json\nmodel = 1\n", "#:schema ./run.schema.json\n"),
        ("# mine\n#:schema ./run.schema.json\n", ""),
        (None, ""),
    ],
)
def test_a_file_that_is_replaced_keeps_its_schema(
    tmp_path: Path, old: str | None, kept: str
) -> None:
    run = run_from_dict({"model": "gpt2", "cluster": "8xH100-SXM"})
    path = tmp_path / "run.toml"
    if old is not None:
        path.write_text(old)
    replace_run(path, run)
    assert path.read_text() == kept + write_run(run)
    assert read_run(path) == run


def test_it_is_written_back_to_an_equal_run(tmp_path: Path) -> None:
    for run in (read_run(write(tmp_path, SHORT)), read_run(write(tmp_path, SHORT)).resolved()):
        assert read_run(write(tmp_path, write_run(run))) == run


def test_a_configuration_without_formulas_is_found_again_from_anywhere(tmp_path: Path) -> None:
    """Its folder was named beside the first run.toml; the second lies in the folder of a run."""
    (tmp_path / "neo").mkdir()
    (tmp_path / "neo" / "config.json").write_text('{"model_type": "stablelm"}')
    for text in ('model = "neo"', 'model = { pretrained = "neo" }'):
        run = read_run(write(tmp_path, SHORT.replace('model = "llama-3-8b"', text)))
        elsewhere = tmp_path / "runs"
        elsewhere.mkdir(exist_ok=True)
        assert read_run(write(elsewhere, write_run(run))) == run


@given(
    kind=st.sampled_from(["ddp", "zero1", "zero2", "zero3"]),
    model=st.sampled_from(catalogue.model_names()),
    device=st.sampled_from(list(catalogue.devices())),
    nodes=st.integers(1, 1000),
    network=st.none() | st.floats(1e6, 1e15),
    recompute=st.sampled_from(["none", "selective", "full"]) | st.floats(0, 1),
    seq_len=st.integers(1, 10**6),
)
def test_every_run_round_trips(
    kind: str,
    model: str,
    device: str,
    nodes: int,
    network: float | None,
    recompute: object,
    seq_len: int,
) -> None:
    cluster: dict[str, object] = {"device": device, "nodes": nodes, "devices_per_node": 8}
    if network is not None:
        cluster["network"] = network
    run = run_from_dict(
        {
            "model": {"preset": model},
            "cluster": cluster,
            "job": {"seq_len": seq_len},
            "strategy": {"kind": kind, "recompute": recompute},
        }
    )
    assert run_from_dict(tomllib.loads(write_run(run))) == run


def test_overrides_of_a_preset(tmp_path: Path) -> None:
    text = (
        SHORT.replace('model = "llama-3-8b"', "") + '[model]\npreset = "llama-3-8b"\nlayers = 4\n'
    )
    assert read_run(write(tmp_path, text)).model.layers == 4  # type: ignore[union-attr]


def test_all_problems_of_all_sections_at_once(tmp_path: Path) -> None:
    text = """
    cluster = "4x8xH10-SXM"
    [model]
    preset = "lama-3-8b"
    [job]
    seqlen = 4
    [stratgy]
    kind = "zero3"
    """
    with pytest.raises(SpecError) as caught:
        read_run(write(tmp_path, text))
    found = "\n".join(caught.value.problems)
    for expected in (
        "stratgy: unknown section; did you mean 'strategy'?",
        "did you mean 'llama-3-8b'?",
        "did you mean 'H100-SXM'?",
        "job.seqlen: unknown key; did you mean 'seq_len'?",
        "job.seq_len: is required",
    ):
        assert expected in found


def test_a_batch_too_small_for_the_cluster(tmp_path: Path) -> None:
    text = SHORT.replace("4Mi", "1000")
    with pytest.raises(SpecError, match="less than half of one micro-batch"):
        read_run(write(tmp_path, text)).resolved()


@given(st.text(max_size=200))
def test_random_text_never_crashes(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.getbasetemp() / "random.toml"
    file.write_bytes(text.encode("utf-8", errors="replace"))
    with pytest.raises(SpecError) as caught:
        read_run(file)
    assert caught.value.problems


def test_a_file_may_leave_out_job_and_strategy(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, 'model = "gpt2"\ncluster = "8xH100-SXM"\n')).resolved()
    assert (run.job.seq_len, run.strategy.kind) == (1024, "zero3")
    alone = read_run(write(tmp_path, 'model = "gpt2"\ncluster = "H100-SXM"\n'))
    assert alone.strategy.kind == "single"


def test_hsdp_as_a_kind(tmp_path: Path) -> None:
    text = SHORT.replace('strategy = "hsdp"', "") + '[strategy]\nkind = "hsdp"\n'
    assert read_run(write(tmp_path, text)).resolved().strategy.shard == 8


def test_cpus_have_the_memory_of_this_machine_wherever_a_run_is_read(tmp_path: Path) -> None:
    """`estimate`, `doctor` and exports say the same as `train`; the file keeps the short name."""
    pytest.importorskip("torch")
    import psutil
    import torch

    from shardwise.trainer.start import for_actual_processes

    file = tmp_path / "run.toml"
    file.write_text('model = "gpt2"\ncluster = "1x1xCPU"\nstrategy = "single"\n')
    run = read_run(file)
    read, trained = run.resolved(), for_actual_processes(run, torch.device("cpu"))
    assert read.cluster.device.memory == psutil.virtual_memory().total
    assert trained.cluster.device.capacity == read.cluster.device.capacity
    assert run.resolved().resolved() == read
    assert run_table(read)["cluster"]["device"] == "CPU"
