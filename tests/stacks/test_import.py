"""`shardwise import`: scripts read without running them, and files that mean harm refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from shardwise.spec.dtype import DTYPE_BYTES, TORCH_NAMES
from shardwise.spec.record import SpecError
from shardwise.spec.run import run_from_dict
from shardwise.stacks import fsdp1, torch_script, trainer
from shardwise.stacks.imports import MAX_BYTES, import_file
from shardwise.stacks.torch_values import DTYPES

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "fsdp1_script.py"
HEAD = """
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, fully_shard
"""


def shardwise(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shardwise", *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1"},
        check=False,
    )


def strategy(body: str) -> dict[str, Any]:
    return torch_script.read(HEAD + body).strategy


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("FULL_SHARD", {"kind": "zero3"}),
        ("SHARD_GRAD_OP", {"kind": "zero2"}),
        ("NO_SHARD", {"kind": "ddp"}),
        ("HYBRID_SHARD", {"kind": "zero3", "within_node": True}),
        ("_HYBRID_SHARD_ZERO2", {"kind": "zero2", "within_node": True}),
    ],
)
def test_sharding_strategies(name: str, fields: dict[str, object]) -> None:
    found = strategy(f"model = FSDP(net, sharding_strategy=ShardingStrategy.{name})")
    assert fields.items() <= found.items()
    assert ("within_node" in found) is ("within_node" in fields)


def test_every_sharding_strategy_of_torch_is_known() -> None:
    torch_fsdp = pytest.importorskip("torch.distributed.fsdp")
    assert set(fsdp1.SHARDING) == {member.name for member in torch_fsdp.ShardingStrategy}
    members = {member.name for member in torch_fsdp.BackwardPrefetch}
    assert set(fsdp1.PREFETCH) == {*members, "None"}


def test_every_argument_of_torchs_fsdp_is_spoken_of() -> None:
    import inspect

    torch_fsdp = pytest.importorskip("torch.distributed.fsdp")
    arguments = set(inspect.signature(torch_fsdp.FullyShardedDataParallel).parameters)
    told = " ".join(setting for setting, _ in fsdp1.table()) + " sharding_strategy module"
    spelled = {"mixed_precision": "MixedPrecision", "cpu_offload": "CPUOffload"}
    assert {name for name in arguments if spelled.get(name, name) not in told} == set()


def test_every_name_of_a_dtype_is_torchs() -> None:
    torch = pytest.importorskip("torch")
    assert set(DTYPES.values()) == set(DTYPE_BYTES)
    for name, dtype in DTYPES.items():
        found = getattr(torch, name)
        assert found.itemsize == DTYPE_BYTES[dtype]
        assert found is getattr(torch, TORCH_NAMES[dtype])


def test_names_are_followed_to_where_they_are_written() -> None:
    found = strategy(
        """
SHARDING = ShardingStrategy.SHARD_GRAD_OP
half = torch.float16
policy = MixedPrecision(param_dtype=half)
settings = dict(sharding_strategy=SHARDING, mixed_precision=policy)
model = FSDP(net, **settings, cpu_offload=CPUOffload(offload_params=True),
             forward_prefetch=True, backward_prefetch=None)
"""
    )
    assert found["kind"] == "zero2"
    # FSDP1 reduces in the dtype of the parameters unless it is told otherwise.
    assert (found["param_dtype"], found["reduce_dtype"]) == ("fp16", "fp16")
    assert (found["offload"], found["forward_prefetch"], found["prefetch"]) == (True, 1, 0)


@pytest.mark.parametrize(
    "body",
    [
        "model = FSDP(net, sharding_strategy=args.strategy)",
        "s = ShardingStrategy.NO_SHARD if big else ShardingStrategy.FULL_SHARD\n"
        "model = FSDP(net, sharding_strategy=s)",
        "def wrap(net, s):\n    return FSDP(net, sharding_strategy=s)",
        "s = ShardingStrategy.NO_SHARD\ns = ShardingStrategy.SHARD_GRAD_OP\n"
        "model = FSDP(net, sharding_strategy=s)",
        "a = FSDP(net, sharding_strategy=ShardingStrategy.NO_SHARD)\n"
        "b = FSDP(net, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)",
    ],
)
def test_what_is_decided_at_run_time_is_listed_and_not_guessed(body: str) -> None:
    found = torch_script.read(HEAD + body)
    assert found.strategy["kind"] == "zero3"
    assert any(loss.startswith("sharding_strategy: ") for loss in found.losses)


LOOP = """
model = {model}
accumulation_steps = 4
for i, batch in enumerate(loader):
    {block}
"""
INSIDE = "with model.no_sync():\n        model(batch).backward()"
OUTSIDE = "loss = model(batch)\n    with model.no_sync():\n        loss.backward()"


@pytest.mark.parametrize(
    ("model", "block", "sync"),
    [
        ("FSDP(net)", "model(batch).backward()", "every"),
        ("FSDP(net)", INSIDE, "last"),
        # Measured: FSDP1 reads the flag in the backward, DDP in the forward.
        ("FSDP(net)", OUTSIDE, "last"),
        ("torch.nn.parallel.DistributedDataParallel(net)", INSIDE, "last"),
        ("torch.nn.parallel.DistributedDataParallel(net)", OUTSIDE, "every"),
    ],
)
def test_accumulation(model: str, block: str, sync: str) -> None:
    found = strategy(LOOP.format(model=model, block=block))
    assert (found["accumulate"], found["grad_sync"]) == (4, sync)


def test_fsdp2_scripts() -> None:
    found = strategy(
        """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, CPUOffloadPolicy
mesh = init_device_mesh("cuda", (2, 4))
kw = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
for block in net.blocks:
    fully_shard(block, reshard_after_forward=2, offload_policy=CPUOffloadPolicy(), **kw)
fully_shard(net, reshard_after_forward=False, **kw)
"""
    )
    assert found == {
        "kind": "zero3",
        "reshard_after_forward": 2,
        "param_dtype": "bf16",
        "reduce_dtype": "fp32",
        "replicate": 2,
        "shard": 4,
        "offload": True,
    }


def test_a_script_is_never_run(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    trap = f"open({str(tmp_path / 'ran')!r}, 'w')"
    file.write_text(f"{HEAD}\n{trap}\nmodel = FSDP(net, device_id={trap})\n")
    assert import_file(file).strategy["kind"] == "zero3"
    assert not (tmp_path / "ran").exists()


def test_training_arguments() -> None:
    found = trainer.read(
        {
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 16,
            "bf16": True,
            "fsdp": "shard_grad_op auto_wrap offload",
            "learning_rate": "1e-4",
            "gradient_checkpointing": True,
            "max_steps": -1,
        }
    )
    assert found.strategy["kind"] == "zero2"
    assert (found.strategy["micro_batch"], found.strategy["accumulate"]) == (2, 16)
    assert (found.strategy["offload"], found.strategy["recompute"]) == (True, "full")
    assert found.train == {"learning_rate": 1e-4}


DEEP = 100_000
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
# Names of names: 2**60 steps for whoever follows each anew.
DOUBLING = "\n".join(
    [*(f"a{n} = a{n + 1} + a{n + 1}" for n in range(60)), "a60 = 1", "seq_len = a0", "FSDP(a0)"]
)
FSDP_YAML = "distributed_type: FSDP\n"
HARMFUL: dict[str, tuple[str, bytes]] = {
    "empty": ("a.yaml", b""),
    "binary": ("a.json", bytes(range(256))),
    "zeros": ("a.py", b"FSDP(x)\0"),
    "latin": ("a.yaml", "distributed_type: \xe9".encode("latin-1")),
    "not JSON": ("a.json", b'{"a": 1,}'),
    "deep JSON": ("a.json", b'{"a":' * DEEP + b"1" + b"}" * DEEP),
    "deep list": ("a.json", b"[" * DEEP),
    "twice in JSON": ("a.json", b'{"train_batch_size": 1, "train_batch_size": 2}'),
    "NaN": ("a.json", b'{"train_batch_size": NaN}'),
    "long number": ("a.json", b'{"train_batch_size": ' + b"9" * 10_000 + b"}"),
    "bomb": ("a.yaml", (FSDP_YAML + BOMB).encode()),
    "alias": ("a.yaml", b"distributed_type: &a FSDP\nmixed_precision: *a"),
    "python tag": ("a.yaml", b"distributed_type: !!python/object/apply:os.system ['touch pwned']"),
    "deep YAML": ("a.yaml", b"distributed_type: " + b"[" * 1000 + b"]" * 1000),
    "twice in YAML": ("a.yaml", b"distributed_type: FSDP\ndistributed_type: NO\n"),
    "not YAML": ("a.yaml", b"distributed_type: [\n"),
    "a list": ("a.yaml", b"- 1\n- 2\n"),
    "a word": ("a.yaml", b"hello"),
    "other keys": ("a.yaml", b"hello: world"),
    "number keys": ("a.yaml", b"1: FSDP"),
    "wrong types": ("a.yaml", b"distributed_type: FSDP\nfsdp_config: [1]"),
    "not Python": ("a.py", b"def :"),
    "deep Python": ("a.py", b"(" * 5_000 + b")" * 5_000),
    "no model": ("a.py", b"print('hello')"),
    "a TOML": ("a.toml", b"[model]"),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_harm_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / HARMFUL[name][0]
    file.write_bytes(HARMFUL[name][1])
    with pytest.raises(SpecError) as refused:
        import_file(file)
    assert len(refused.value.problems) == 1
    assert len(str(refused.value)) < 600
    assert not (tmp_path / "pwned").exists()


def test_names_of_names_are_followed_once(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(HEAD + DOUBLING)
    assert import_file(file).strategy["kind"] == "zero3"


def test_large_files_are_not_read(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    with file.open("wb") as sparse:
        sparse.truncate(100 * 2**20)
    assert file.stat().st_size > MAX_BYTES
    with pytest.raises(SpecError, match="104,857,600 bytes"):
        import_file(file)


def test_the_command_prints_what_the_file_tells(tmp_path: Path) -> None:
    done = shardwise("import", str(EXAMPLE), folder=tmp_path)
    assert done.returncode == 0
    found = tomllib.loads(done.stdout)
    assert set(found) == {"strategy", "job", "train"}
    assert found["strategy"]["grad_sync"] == "last"
    assert "give --cluster" in done.stderr


def test_the_command_writes_a_run(tmp_path: Path) -> None:
    words = ("--model", "llama-3-8b", "--cluster", "4x8xH100-SXM@400Gbps", "-o", "run.toml")
    done = shardwise("import", str(EXAMPLE), *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    run = run_from_dict(tomllib.loads((tmp_path / "run.toml").read_text())).resolved()
    assert (run.strategy.shard, run.strategy.replicate) == (8, 4)
    assert run.train is not None
    assert run.train.learning_rate == 3e-4
    told = json.loads(shardwise("import", str(EXAMPLE), "--json", folder=tmp_path).stdout)
    assert told["strategy"]["kind"] == "zero3"


def test_the_number_of_processes_asks_for_their_device(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "a.yaml").write_text(f"{FSDP_YAML}num_processes: 16\nnum_machines: 2\n")
    done = shardwise("import", "a.yaml", "--model", "gpt2", "-o", "run.toml", folder=tmp_path)
    assert done.returncode == 2
    assert "16 processes" in done.stderr
    assert "2x8xH100-SXM" in done.stderr
    assert not (tmp_path / "run.toml").exists()


def test_plan_compares_with_what_runs_today(tmp_path: Path) -> None:
    common = ("--model", "llama-3-8b", "--cluster", "8xH100-SXM", "--global-batch", "512K")
    (tmp_path / "run.toml").write_text('[strategy]\nkind = "zero3"\nrecompute = "full"\n')
    for current in (str(EXAMPLE), "run.toml"):
        words = ("plan", *common, "--current", current, "--json")
        found = json.loads(shardwise(*words, folder=tmp_path).stdout)
        assert "now" in [baseline["name"] for baseline in found["baselines"]]
    (tmp_path / "none.toml").write_text("[job]\nseq_len = 1\n")
    refused = shardwise("plan", *common, "--current", "none.toml", folder=tmp_path)
    assert refused.returncode == 2
    assert "[strategy]" in refused.stderr


def test_groups_keep_their_size_on_another_cluster(tmp_path: Path) -> None:
    from shardwise.api import _current, describe_run

    run = describe_run("llama-3-8b", "4x8xH100-SXM@400Gbps")
    hybrid = {"kind": "zero3", "replicate": 2, "shard": 8}
    written = "\n".join(f"{key} = {json.dumps(value)}" for key, value in hybrid.items())
    (tmp_path / "run.toml").write_text(f"[strategy]\n{written}\n")
    (tmp_path / "ds.json").write_text(
        '{"train_batch_size": 32, "zero_optimization": {"stage": 3, "mics_shard_size": 8}}'
    )
    for name in ("run.toml", "ds.json"):
        found = _current(tmp_path / name, run)
        assert (found.shard, found.replicate) == (8, 4)


def test_the_page_shows_the_table_of_the_code() -> None:
    page = (ROOT / "docs" / "how-to" / "from-fsdp1.md").read_text()
    rows = [f"| `{setting}` | {becomes} |" for setting, becomes in fsdp1.table()]
    assert "\n".join(rows) in page
