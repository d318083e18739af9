"""The script that a run becomes: whole, formatted, and made of torch and nothing else."""

from __future__ import annotations

import ast
import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec, run_from_dict
from shardwise.stacks.write.exports import export_run
from tests.units.reduced import build, reduced

MODEL: dict[str, Any] = {
    "name": "small",
    "family": "llama",
    "layers": 3,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 96,
    "vocab": 256,
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "single": {"kind": "single"},
    "single recomputed": {"kind": "single", "recompute": "full", "param_dtype": "fp32"},
    "ddp": {"kind": "ddp"},
    "ddp every": {"kind": "ddp", "accumulate": 2, "grad_sync": "every", "param_dtype": "fp32"},
    "ddp buckets": {"kind": "ddp", "accumulate": 4, "ddp_bucket_mib": 5, "compile": True},
    "ddp rounded": {"kind": "ddp", "compress": "fp16"},
    "zero1": {"kind": "zero1", "accumulate": 2},
    "zero2": {"kind": "zero2", "accumulate": 2, "recompute": "full"},
    "zero3": {"kind": "zero3"},
    "zero3 fp32": {"kind": "zero3", "param_dtype": "fp32"},
    "zero3 in groups": {"kind": "zero3", "reshard_after_forward": 2, "accumulate": 2},
    "zero3 prefetch": {"kind": "zero3", "prefetch": 2, "forward_prefetch": 1, "recompute": 0.5},
    "zero3 units": {"kind": "zero3", "blocks_per_unit": 2, "prefetch": 0, "forward_prefetch": 2},
    "zero3 offload": {"kind": "zero3", "offload": True, "recompute": "selective"},
    "zero3 master": {"kind": "zero3", "master_dtype": "bf16", "compile": True},
    "hybrid": {"kind": "zero3", "shard": 2, "replicate": 2, "accumulate": 2},
    "zero3 chunked": {"kind": "zero3", "loss": "chunked"},
    "ddp chunked": {"kind": "ddp", "loss": "chunked", "loss_chunks": 5},
    "hybrid zero2": {"kind": "zero2", "shard": 2, "accumulate": 3, "grad_sync": "last"},
}
MODELS: dict[str, Any] = {
    "llama": MODEL,
    "biased": {**MODEL, "attention_bias": True, "mlp_bias": True},
    "tied": {**MODEL, "tied": True, "kv_heads": 4},
    "qwen2": {**MODEL, "family": "qwen2"},
    "qwen3": {**MODEL, "family": "qwen3"},
    "gpt2": {**MODEL, "family": "gpt2", "kv_heads": 4},
    "gemma2": {**MODEL, "family": "gemma2", "window": 8},
    "factory": "tests.distributed.sources:fragile",
}
TRAINS: dict[str, dict[str, Any]] = {
    "": {},
    "constant": {"schedule": "constant", "clip_norm": 0, "log_every": 1, "checkpoint": False},
    "warm": {"schedule": "constant", "warmup_steps": 5, "non_finite": "skip"},
    "saves": {"warmup_steps": 5, "checkpoint": {"every": 10}, "threads": 2},
}
DATA: dict[str, dict[str, Any]] = {
    "": {},
    "tokens": {"path": "text.txt"},
    "in order": {"path": "text.txt", "shuffle": False},
    "own": {"source": "tests.distributed.sources:equal"},
}


EXPERTS = {**MODEL, "family": "mixtral", "experts": 3, "experts_per_token": 2}


def make_run(
    strategy: dict[str, Any],
    model: Any = MODEL,
    device: str = "CPU",
    train: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    optimizer: str = "adamw",
) -> RunSpec:
    devices = 1 if strategy["kind"] == "single" else 4
    sections = {
        "cluster": f"1x{devices}x{device}",
        "model": model,
        "job": {"seq_len": 32, "optimizer": optimizer},
        "strategy": {"micro_batch": 2, **strategy},
        "train": train or {},
        "data": data or {},
    }
    return run_from_dict(sections).resolved()


def matrix() -> dict[str, RunSpec]:
    """Every strategy and every model at least once, and each other setting with some of them."""
    found = {
        f"{name} {device}": make_run(strategy, device=device)
        for name, strategy in STRATEGIES.items()
        for device in ("CPU", "H100-SXM")
    }
    for kind in ("single", "ddp", "zero3", "zero3 units"):
        for name, model in MODELS.items():
            found[f"{name} {kind}"] = make_run(STRATEGIES[kind], model)
        for name, train in TRAINS.items():
            found[f"{kind} {name}"] = make_run(STRATEGIES[kind], train=train)
        for name, data in DATA.items():
            found[f"{kind} {name}"] = make_run(STRATEGIES[kind], data=data)
        for name in ("adam", "sgd", "momentum"):
            found[f"{kind} {name}"] = make_run(STRATEGIES[kind], optimizer=name)
        for name in ("tied", "gpt2", "gemma2"):
            chunked = {**STRATEGIES[kind], "loss": "chunked"}
            found[f"{name} {kind} chunked"] = make_run(chunked, MODELS[name])
        whole = {"meta_init": False}
        found[f"{kind} whole"] = make_run(STRATEGIES[kind], MODELS["factory"], train=whole)
    return found


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    for number, (name, run) in enumerate(matrix().items()):
        text = export_run(run, "python").text
        compile(text, name, "exec")
        (folder / f"{number:03}-{name.replace(' ', '-')}.py").write_text(text)
    return folder


def imported(text: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    return found


def test_scripts_are_formatted_and_name_nothing_unknown(scripts: Path) -> None:
    if shutil.which("ruff") is None:
        pytest.skip("needs ruff")
    for command in (("check", "--select", "E,F"), ("format", "--check", "--diff")):
        words = ["ruff", *command, "--isolated", "--line-length", "100", str(scripts)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:]


def test_a_model_that_is_written_out_needs_torch_alone() -> None:
    for name in ("llama", "biased", "tied", "qwen2", "qwen3"):
        written = export_run(make_run(STRATEGIES["zero3"], MODELS[name]), "python")
        assert imported(written.text) - sys.stdlib_module_names == {"torch"}
        assert not [loss for loss in written.unsupported if loss.startswith("model")]


def test_other_models_come_from_transformers_and_it_says_so() -> None:
    written = export_run(make_run(STRATEGIES["zero3"], MODELS["gemma2"]), "python")
    assert imported(written.text) - sys.stdlib_module_names == {"torch", "transformers"}
    assert any(sentence.startswith("model: ") for sentence in written.unsupported)


def test_a_factory_is_imported() -> None:
    written = export_run(make_run(STRATEGIES["zero3"], MODELS["factory"]), "python")
    assert imported(written.text) - sys.stdlib_module_names == {"torch", "tests"}


@pytest.mark.parametrize(
    ("config", "written"),
    [
        ({}, True),
        ({"rope_theta": 500000.0}, True),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, False),
        ({"attention_dropout": 0.1}, False),
        ({"pad_token_id": 0}, False),
    ],
)
def test_what_a_configuration_asks_for_decides(
    tmp_path: Path, config: dict[str, Any], written: bool
) -> None:
    usual = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
    }
    (tmp_path / "config.json").write_text(json.dumps({**usual, **config}))
    run = make_run(STRATEGIES["zero3"], str(tmp_path))
    text = export_run(run, "python").text
    assert ("transformers" not in imported(text)) == written
    assert not config.get("rope_theta") or "ROPE_THETA = 500000.0\n" in text
    by_file = make_run(STRATEGIES["zero3"], str(tmp_path / "config.json"))
    assert export_run(by_file, "python").text == text
    # It is read again, and may have changed.
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(SpecError, match="holds no JSON object"):
        export_run(run, "python")


def test_only_what_a_run_needs_is_in_its_script() -> None:
    text = {name: export_run(make_run(s), "python").text for name, s in STRATEGIES.items()}
    for word, names in {
        "dist.": set(STRATEGIES) - {"single", "single recomputed"},
        "DistributedDataParallel": {
            "ddp",
            "ddp every",
            "ddp buckets",
            "ddp chunked",
            "ddp rounded",
        },
        "register_comm_hook": {"ddp rounded"},
        "no_sync": {"ddp buckets"},
        "set_requires_gradient_sync": {"zero1", "hybrid zero2"},
        "set_requires_all_reduce": {"hybrid"},
        "set_reshard_after_backward": {"zero1", "zero2", "hybrid zero2"},
        "set_modules_to_backward_prefetch": {"zero3 prefetch", "zero3 units"},
        "set_modules_to_forward_prefetch": {"zero3 prefetch", "zero3 units"},
        "CPUOffloadPolicy": {"zero3 offload"},
        "block.forward = partial(": {
            *("single recomputed", "zero2", "zero3 prefetch", "zero3 offload")
        },
        ".compile()": {"ddp buckets", "zero3 master"},
        "autocast": {"single", "ddp", "ddp buckets", "ddp chunked", "ddp rounded"},
        "ChunkedLoss": {"zero3 chunked", "ddp chunked"},
        "LOSS_CHUNKS": {"zero3 chunked", "ddp chunked"},
    }.items():
        assert {name for name in text if word in text[name]} == names, word


def test_a_sharded_llama_stays_short() -> None:
    text = export_run(make_run(STRATEGIES["zero3"]), "python").text
    assert len(text.splitlines()) < 350


def test_how_it_is_started() -> None:
    assert export_run(make_run(STRATEGIES["single"]), "python").command == "python train.py"
    zero3 = make_run(STRATEGIES["zero3"])
    assert export_run(zero3, "python").command == "torchrun --nproc-per-node 4 train.py"
    two = zero3._replace(cluster=zero3.cluster.but(nodes=2))
    assert export_run(two, "python").command.startswith("torchrun --nnodes 2 --nproc-per-node 4 ")


def test_an_optimizer_that_torch_lacks_is_refused() -> None:
    with pytest.raises(SpecError, match="job.optimizer: python .* lion"):
        export_run(make_run(STRATEGIES["zero3"], optimizer="lion"), "python")


def test_a_chunked_loss_of_a_factory_is_refused() -> None:
    run = make_run(STRATEGIES["zero3 chunked"], MODELS["factory"])
    for stack in ("python", "lightning"):
        with pytest.raises(SpecError, match="strategy.loss: chunked needs a model"):
            export_run(run, stack)


def names_of(run: RunSpec) -> dict[str, Any]:
    """What a script defines."""
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(export_run(run, "python").text, "train.py", "exec"), names)
    return names


@pytest.mark.parametrize("loss", ["plain", "chunked"])
@pytest.mark.parametrize(
    "model",
    [
        *(MODELS["llama"], MODELS["biased"], MODELS["tied"], MODELS["qwen2"], MODELS["qwen3"]),
        {**MODEL, "family": "mistral", "window": 33},
        {**MODEL, "activation": "gelu", "head_dim": 24},
    ],
)
def test_a_written_model_is_the_model_of_the_trainer(model: dict[str, Any], loss: str) -> None:
    """Its first weights, loss and gradients are the same, bit for bit."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from shardwise.engine.loss import loss_of
    from shardwise.engine.parallelize import parallelize
    from shardwise.pytorch.build import build_module

    strategy = {"kind": "single", "param_dtype": "fp32", "loss": loss, "loss_chunks": 5}
    run = make_run(strategy, model, train={"seed": 3})
    names = names_of(run)
    ours = names["Transformer"]()
    names["initialize"](ours)
    with torch.device("meta"):
        theirs = build_module(run.model)
    theirs = parallelize(theirs, run.strategy, device=torch.device("cpu"), seed=3)

    weights = dict(theirs.named_parameters())
    assert [name for name, _ in ours.named_parameters()] == list(weights)
    assert all(torch.equal(p, weights[name]) for name, p in ours.named_parameters())
    ids = next(names["micro_batches"](0, 1))
    found = names["loss_sum"](ours, ids)
    expected = loss_of(theirs)(ids[:, :-1], ids[:, 1:])
    assert found.item() == expected.item()
    found.backward()
    expected.backward()
    assert all(torch.equal(p.grad, weights[name].grad) for name, p in ours.named_parameters())


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "opt", "phi"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_chunked_loss_of_transformers_is_that_of_the_trainer(family: str, dtype: str) -> None:
    """Bit for bit, with what a model does to its logits; in bf16 by autocast."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from shardwise.engine.loss import loss_of
    from shardwise.engine.parallelize import parallelize

    strategy = {"kind": "single", "param_dtype": dtype, "loss": "chunked", "loss_chunks": 5}
    spec = reduced(family, hidden=64, head_dim=16, ffn=96, vocab=256)
    run = make_run(strategy, spec.model_dump())
    names = names_of(run)
    ours = build(spec, device="cpu").eval()  # without dropout
    theirs = parallelize(copy.deepcopy(ours), run.strategy)
    names["compute_loss_in_chunks"](ours)
    ids = next(names["micro_batches"](0, 1))
    found = names["loss_sum"](ours, ids)
    expected = loss_of(theirs)(ids[:, :-1], ids[:, 1:])
    assert found.item() == expected.item()
    found.backward()
    expected.backward()
    pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


@pytest.mark.parametrize("vocab", [256, 250, 128256])
@pytest.mark.parametrize("seed", [0, 2**40 + 1])
def test_made_up_sequences_are_those_of_the_trainer(vocab: int, seed: int) -> None:
    torch = pytest.importorskip("torch")
    from shardwise.trainer.data.batches import Layout, SyntheticBatches

    run = make_run({"kind": "zero3"}, {**MODEL, "vocab": vocab}, train={"seed": seed})
    given = names_of(run)["micro_batches"](1, 4)
    batches = SyntheticBatches(Layout(1, 4, 2, 3, 32), vocab, seed)
    for step in range(4):
        for batch in batches.at(step):
            ids = next(given)
            assert torch.equal(ids[:, :-1], batch.inputs)
            assert torch.equal(ids[:, 1:], batch.targets)


@pytest.mark.parametrize("shuffle", [True, False])
def test_tokens_are_read_as_the_trainer_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: bool
) -> None:
    """In three files of which none ends with a sequence, over several epochs."""
    torch = pytest.importorskip("torch")
    import numpy as np

    from shardwise.trainer.data import tokenize
    from shardwise.trainer.data.batches import Layout, TokenBatches
    from shardwise.trainer.data.shards import write_shards

    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("never read")
    tokens = np.random.default_rng(0).integers(0, 2**16, 1000).astype(np.uint16)
    run = make_run({"kind": "zero3"}, data={"path": "text.txt", "shuffle": shuffle})
    assert run.data is not None
    with pytest.raises(FileNotFoundError):
        next(names_of(run)["micro_batches"](0, 1))
    folder = Path(run.data.cache) / tokenize._cache_name(run.data, [Path("text.txt")])
    write_shards(folder, [tokens], {"vocab": 2**16}, shard_tokens=400)
    given = names_of(run)["micro_batches"](1, 4)
    batches = TokenBatches(run.data, Layout(1, 4, 2, 3, 32), 2**16, seed=0)
    for step in range(6):
        for batch in batches.at(step):
            ids = next(given)
            assert torch.equal(ids[:, :-1], batch.inputs)
            assert torch.equal(ids[:, 1:], batch.targets)
    assert (
        f"data.path: the script reads the tokens in {folder}."
        in export_run(run, "python").unsupported
    )


@pytest.mark.parametrize(
    "train",
    [
        {"steps": 30},
        {"steps": 30, "warmup_steps": 7, "final_learning_rate": 0.0},
        {"steps": 30, "warmup_steps": 30},
        {"steps": 30, "warmup_steps": 7, "schedule": "constant"},
        {"steps": 30, "warmup_steps": 7, "schedule": "linear"},
    ],
)
def test_learning_rates_are_those_of_the_trainer(train: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    run = make_run({"kind": "zero3"}, train=train)
    rate = names_of(run)["learning_rate"]
    assert run.train is not None
    assert [rate(step) for step in range(30)] == [run.train.learning_rate_at(s) for s in range(30)]


def test_blocks_are_found_where_the_trainer_finds_them() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from shardwise.pytorch.blocks import find_blocks
    from shardwise.pytorch.build import build_module
    from shardwise.spec.families import FAMILIES
    from shardwise.stacks.write.python.model import model_choices

    search = names_of(make_run({"kind": "zero3"}, MODELS["factory"]))["find_blocks"]
    # Of these transformers has no fused attention, which the trainer asks for.
    for family in sorted(set(FAMILIES) - {"gemma2", "mpt"}):
        moe = family in ("mixtral", "qwen3_moe")
        experts = {"experts": 4, "experts_per_token": 2} if moe else {}
        heads = {"kv_heads": 4} if family in ("gpt2", "mpt", "opt", "gpt_neox") else {}
        run = make_run({"kind": "zero3"}, {**MODEL, "family": family, **experts, **heads})
        with torch.device("meta"):
            model = build_module(run.model)
        expected = list(find_blocks(model).values())
        blocks: Any = model.get_submodule(str(model_choices(run)["BLOCKS"]))
        assert list(blocks) == expected == search(model)


@pytest.mark.parametrize("stack", ["python", "lightning"])
@pytest.mark.parametrize(
    ("model", "strategy", "places"),
    [
        (EXPERTS, {"kind": "zero3"}, True),
        (EXPERTS, {"kind": "zero2", "shard": 2}, True),
        # 4 devices divide 4 experts; torch supports nothing else after an integer reshard.
        ({**EXPERTS, "experts": 4}, {"kind": "zero3"}, False),
        (EXPERTS, {"kind": "zero3", "reshard_after_forward": 2}, False),
        (EXPERTS, {"kind": "ddp"}, False),
        (MODEL, {"kind": "zero3"}, False),
        # Its tensors are known only where it is built.
        ("tests.distributed.sources:fragile", {"kind": "zero3"}, True),
    ],
    ids=str,
)
def test_experts_that_would_be_padded_are_placed(
    model: Any, strategy: dict[str, Any], places: bool, stack: str
) -> None:
    text = export_run(make_run(strategy, model), stack).text
    ast.parse(text)
    assert ("shard_placement_fn" in text) == places
    assert ("import Shard" in text) == places
