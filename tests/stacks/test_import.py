"""`shardwise import`: scripts read without running them, and files that mean harm refused."""

from __future__ import annotations

import json
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest

from shardwise.spec.dtype import DTYPE_BYTES, TORCH_NAMES
from shardwise.spec.lookup import find_cluster, find_model
from shardwise.spec.record import SpecError, SpecWarning
from shardwise.spec.run import run_from_dict, run_table
from shardwise.spec.strategy import Strategy
from shardwise.stacks.read import accelerate, deepspeed, fsdp1, known_keys, torch_script, trainer
from shardwise.stacks.read.imported import Imported
from shardwise.stacks.read.imports import MAX_BYTES, import_file, imported_run, imported_strategy
from shardwise.stacks.read.summary import imported_toml
from shardwise.stacks.read.torch_values import DTYPES
from shardwise.stacks.write.accelerate import export
from tests.command import shardwise
from tests.stacks.runs import large

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "fsdp1_script.py"
HEAD = """
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, fully_shard
"""


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
    assert any(loss.startswith("sharding_strategy: ") for loss in found.unsupported)


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


# https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments
OF_TRAINER: dict[str, object] = {"epochs": 3.0,
    "learning_rate": 5e-5, "weight_decay": 0.0, "clip_norm": 1.0, "beta1": 0.9, "beta2": 0.999,
    "epsilon": 1e-8, "seed": 42, "schedule": "linear", "final_learning_rate": 0.0,
}  # fmt: skip


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
    assert found.train == {**OF_TRAINER, "learning_rate": 1e-4}


def lost(found: Imported, start: str) -> bool:
    return any(loss.startswith(start) for loss in found.unsupported)


def imported(tmp_path: Path, text: str, name: str = "a.json") -> Imported:
    (tmp_path / name).write_text(text)
    return import_file(tmp_path / name)


@pytest.mark.parametrize("value", ["NaN", '"nan"', "1e400", '"inf"', "-1", "0", "true"])
def test_learning_rates_that_no_run_has_are_refused(value: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"learning_rate|no number"):
        imported(tmp_path, f'{{"fsdp": "full_shard", "learning_rate": {value}}}')


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.json", '{"train_batch_size": 8, "gradient_clipping": -3}', "clip_norm"),
        ("a.json", '{"train_batch_size": 1e999}', "train_batch_size: must be a whole number"),
        ("a.json", '{"per_device_train_batch_size": true}', "per_device_train_batch_size"),
        ("a.json", '{"fsdp": "fullshard"}', "did you mean 'full_shard'"),
        ("a.json", '{"fsdp": {"a": 1}}', "fsdp: must be true, or words"),
        ("a.json", '{"train_batch_size": ' + "9" * 5000 + "}", "thousands of digits"),
        ("a.py", "fully_shard(b, reshard_after_forward=-1)\nfully_shard(m)", "reshard_after"),
        ("a.py", "fully_shard(b, reshard_after_forward=1)\nfully_shard(m)", "reshard_after"),
        ("a.py", "fully_shard(m)\nDataLoader(d, batch_size=True)", "batch_size: must be"),
        ("a.py", "fully_shard(m)\nDataLoader(d, 0)", "batch_size: must be"),
        ("a.py", "fully_shard(m)\nn = " + "9" * 5000, "thousands of digits"),
    ],
)
def test_values_are_valid_or_refused(name: str, text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=says) as refused:
        imported(tmp_path, text, name)
    assert "set_int_max_str_digits" not in str(refused.value)


def test_a_huge_hexadecimal_number_is_listed(tmp_path: Path) -> None:
    found = imported(tmp_path, f"fully_shard(m)\nDataLoader(d, 0x{'f' * 9000})", "a.py")
    assert lost(found, "micro_batch: batch_size a number of thousands of digits is not a value")


def test_misspelled_keys_are_listed() -> None:
    found = accelerate.read(
        {
            "distributed_type": "FSDP",
            "mixed_precison": "bf16",
            "fsdp_config": {"fsdp_version": 2, "fsdp_ofload_params": True},
            "parallelism_config": {"dp_shard_sise": 2},
        }
    )
    for loss in (
        "mixed_precison: unknown to Shardwise; did you mean 'mixed_precision'?",
        "fsdp_config.fsdp_ofload_params: unknown to Shardwise; did you mean 'fsdp_offload_params'?",
        "parallelism_config.parallelism_config_dp_shard_sise: unknown to Shardwise; did you mean "
        "'parallelism_config_dp_shard_size'?",
    ):
        assert loss in found.unsupported
    of_zero: dict[str, object] = {"stage": 3, "ofload_param": {"device": "cpu"}}
    found = deepspeed.read({"zero_optimization": of_zero, "gradient_accumulaton_steps": 4})
    assert lost(found, "zero_optimization.ofload_param: unknown to Shardwise; did you mean")
    assert lost(found, "gradient_accumulaton_steps: unknown to Shardwise; did you mean")
    found = accelerate.read({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stag": 3}})
    assert lost(
        found, "deepspeed_config.zero_stag: unknown to Shardwise; did you mean 'zero_stage'?"
    )
    assert "zero_stage is absent, so its default 2 holds." in found.notes
    found = trainer.read({"fsdp": "full_shard", "fsdp_config": {"versoin": 2}})
    assert lost(found, "fsdp_config.versoin: unknown to Shardwise; did you mean 'version'?")
    found = trainer.read({"fsdp": "full_shard", "gradient_accumulaton_steps": 8})
    assert lost(found, "gradient_accumulaton_steps: unknown to Shardwise; did you mean")
    assert found.strategy["accumulate"] == 1
    found = torch_script.read(HEAD + "FSDP(net, sharding_strategi=1)")
    assert lost(
        found, "FSDP.sharding_strategi: unknown to Shardwise; did you mean 'sharding_strategy'?"
    )


@pytest.mark.nightly
def test_every_key_that_accelerate_writes_is_known() -> None:
    import dataclasses

    config = pytest.importorskip("accelerate.commands.config.config_args")
    fields = {field.name for field in dataclasses.fields(config.ClusterConfig)}
    assert fields <= {*known_keys.ACCELERATE}


def test_every_training_argument_is_known() -> None:
    import dataclasses

    arguments = pytest.importorskip("transformers").TrainingArguments
    fields = {field.name for field in dataclasses.fields(arguments)}
    assert fields <= {*known_keys.TRAINER}


def test_rows_name_the_keys_of_tables_inside_a_file() -> None:
    """Keys that rows read are known, also inside; a misspelled one is not."""
    inside = {"device": "cpu", "pin_memory": True, "devise": "cpu"}
    found = deepspeed.read(
        {
            "zero_optimization": {"stage": 3, "offload_param": inside, "overlap_com": True},
            "tensor_parallel": {"autotp_size": 2, "autotp_sice": 2},
            "train_micro_batch_size_per_gpu": 1,
        }
    )
    unknown = [one.key for one in found.outcomes if one.kind == "unknown"]
    assert unknown == [
        "zero_optimization.overlap_com",
        "zero_optimization.offload_param.devise",
        "tensor_parallel.autotp_sice",
    ]
    assert found.strategy["tensor"] == 2


@pytest.mark.nightly
def test_every_key_of_zero_is_known() -> None:
    config = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig
    named = {field.alias or name for name, field in config.model_fields.items()}
    found = deepspeed.read({"zero_optimization": dict.fromkeys(named)})
    assert [one.key for one in found.outcomes if one.kind == "unknown"] == []


def test_a_default_is_called_a_default() -> None:
    notes = [
        *accelerate.read({"distributed_type": "FSDP", "fsdp_config": {"version": 2}}).notes,
        *deepspeed.read({"train_micro_batch_size_per_gpu": 1}).notes,
        *trainer.read({"fsdp": True}).notes,
        *torch_script.read(HEAD + "FSDP(net)").notes,
    ]
    for key in (
        "fsdp_reshard_after_forward",
        "mixed_precision",
        "zero_optimization.stage",
        "gradient_accumulation_steps",
        "per_device_train_batch_size",
        "sharding_strategy",
    ):
        assert any(note.startswith(f"{key} is absent, so its default ") for note in notes)
        assert not any(note.startswith(f"{key} becomes") for note in notes)


def test_settings_of_the_trainer_without_a_field_are_listed() -> None:
    found = trainer.read(
        {
            "per_device_train_batch_size": 4,
            "optim": "lomo",
            "lr_scheduler_type": "polynomial",
            "warmup_ratio": 0.1,
            "num_train_epochs": 3,
            "warmup_steps": 500,
        }
    )
    for key in ("optim", "lr_scheduler_type", "warmup_ratio", "num_train_epochs", "warmup_steps"):
        assert lost(found, f"{key}: ")
    # Neither steps nor a schedule that a run can have.
    schedule = ("schedule", "final_learning_rate")
    assert found.train == {name: OF_TRAINER[name] for name in OF_TRAINER if name not in schedule}
    assert found.job == {}


@pytest.mark.parametrize(
    "given",
    ["get_policy()", "MixedPrecision(param_dtype=args.dtype)", "MixedPrecision(**settings())"],
)
def test_a_policy_that_is_made_at_run_time_settles_no_dtype(given: str) -> None:
    found = torch_script.read(f"{HEAD}\nFSDP(net, mixed_precision={given})\nx = autocast('cuda')")
    assert not {"param_dtype", "reduce_dtype"} & set(found.strategy)
    assert any("decided when the script runs" in loss for loss in found.unsupported)


def test_settings_in_an_unknown_dictionary_are_not_defaults() -> None:
    found = torch_script.read(f"{HEAD}\nFSDP(net, **json.load(file))")
    assert found.strategy == {"kind": "zero3"}
    assert lost(found, "sharding_strategy: ")
    assert lost(found, "mixed precision: ")


def test_constants_are_not_decided_at_run_time() -> None:
    body = "FSDP(net, mixed_precision=MixedPrecision(param_dtype=torch.float8_e4m3fn))"
    found = torch_script.read(HEAD + body)
    assert lost(found, "param_dtype: float8_e4m3fn is not a value that Shardwise knows")
    two = "FSDP(a, sharding_strategy=ShardingStrategy.NO_SHARD)\n"
    found = torch_script.read(f"{HEAD}{two}FSDP(b, sharding_strategy=ShardingStrategy.FULL_SHARD)")
    assert lost(found, "sharding_strategy: it differs from call to call")


def test_precision_that_is_automatic_is_not_guessed() -> None:
    automatic: dict[str, object] = {
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": "auto"},
        "train_micro_batch_size_per_gpu": "auto",
    }
    found = deepspeed.read(automatic)
    assert not {"param_dtype", "reduce_dtype"} & set(found.strategy)
    assert lost(found, "bf16.enabled: auto")
    # The Trainer says what it is, but only where it is left to it.
    found = trainer.read({"deepspeed": automatic, "bf16": True})
    assert found.strategy["param_dtype"] == "bf16"
    fixed = {**automatic, "bf16": {"enabled": False}, "fp16": {"enabled": True}}
    found = trainer.read({"deepspeed": fixed, "bf16": True})
    assert found.strategy["param_dtype"] == "fp16"
    assert lost(found, "bf16: the settings of deepspeed decide")


def test_two_precisions_are_one_too_many() -> None:
    both: dict[str, object] = {"bf16": {"enabled": True}, "fp16": {"enabled": True}}
    assert lost(deepspeed.read(both), "bf16 and fp16: both")
    assert lost(trainer.read({"bf16": True, "fp16": True, "fsdp": ""}), "bf16 and fp16: both")


@pytest.mark.parametrize(
    ("replicate", "shard", "processes", "fields", "loses"),
    [
        (8, 1, 8, {"kind": "ddp"}, False),
        (1, 8, 8, {"kind": "zero3"}, False),
        (2, 4, 8, {"kind": "zero3", "replicate": 2, "shard": 4}, False),
        (1, 4, 8, {"kind": "zero3", "shard": 4}, True),
        (2, 2, 8, {"kind": "zero3", "shard": 2}, True),
        (1, 4, None, {"kind": "zero3", "shard": 4}, False),
    ],
)
def test_degrees_of_accelerate(
    replicate: int, shard: int, processes: int | None, fields: dict[str, object], loses: bool
) -> None:
    table = {
        "distributed_type": "FSDP",
        "num_processes": processes,
        "fsdp_config": {"fsdp_version": 2},
        "parallelism_config": {
            "parallelism_config_dp_replicate_size": replicate,
            "parallelism_config_dp_shard_size": shard,
        },
    }
    found = accelerate.read(table)
    names = ("kind", "replicate", "shard")
    assert {name: found.strategy[name] for name in names if name in found.strategy} == fields
    assert lost(found, "parallelism_config: ") is loses
    resolved = Strategy.read(imported_strategy(found, 8)).resolve(8, 8)
    assert (resolved.shard or 1) == shard


def test_a_cluster_of_another_size_is_told(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "a.yaml").write_text(f"{FSDP_YAML}num_processes: 16\nnum_machines: 2\n")
    words = ("import", "a.yaml", "--model", "gpt2", "--cluster")
    told = "The file runs 16 processes, --cluster has 8: degrees and the global batch follow"
    assert told in shardwise(*words, "8xH100-SXM", folder=tmp_path).stdout
    same = shardwise(*words, "2x8xH100-SXM@400Gbps", folder=tmp_path)
    assert "--cluster has" not in same.stdout


@pytest.mark.parametrize(("processes", "machines"), [(2, 4), (7, 2)])
def test_processes_that_machines_cannot_share(
    processes: int, machines: int, tmp_path: Path
) -> None:
    pytest.importorskip("yaml")
    text = f"distributed_type: MULTI_CPU\nnum_processes: {processes}\nnum_machines: {machines}\n"
    with pytest.raises(SpecError, match="cannot be shared equally"):
        imported(tmp_path, text, "a.yaml")


def test_a_script_without_a_batch_says_so() -> None:
    found = torch_script.read(HEAD + "FSDP(net)")
    assert not {"micro_batch", "accumulate"} & set(found.strategy)
    assert lost(found, "micro_batch: ")
    assert lost(found, "accumulate: ")


def test_what_an_optimizer_is_given_at_run_time_is_no_default() -> None:
    found = torch_script.read(
        f"{HEAD}FSDP(net)\ntorch.optim.AdamW(p, lr=rate(), betas=pair())\n"
        "torch.nn.utils.clip_grad_norm_(p, 0.5, 2.0)"
    )
    # The second argument is the norm, the third its kind; 0.01 is torch's own decay.
    assert found.train == {"weight_decay": 0.01, "clip_norm": 0.5, "schedule": "constant"}
    assert lost(found, "lr: ")
    assert lost(found, "betas: ")


@pytest.mark.parametrize(
    ("kind", "cluster", "stack", "says"),
    [
        ("single", "1xH100-SXM", "python", 'strategy = "single"'),
        ("ddp", "8xH100-SXM", "lightning", "Lightning's Trainer is not read"),
    ],
)
def test_own_exports_are_not_misjudged(
    kind: str, cluster: str, stack: str, says: str, tmp_path: Path
) -> None:
    text = f'model = "gpt2"\ncluster = "{cluster}"\nstrategy = "{kind}"\n'
    (tmp_path / "run.toml").write_text(text)
    words = ("export", "run.toml", "--to", stack, "-o", "train.py")
    assert shardwise(*words, folder=tmp_path).returncode == 0
    with pytest.raises(SpecError, match=says) as refused:
        import_file(tmp_path / "train.py")
    assert "TrainingArguments" not in str(refused.value)


@pytest.mark.parametrize("kind", ["ddp", "zero2", "zero3"])
def test_own_scripts_come_back(kind: str, tmp_path: Path) -> None:
    more = {"compress": "powersgd", "powersgd_rank": 2} if kind == "ddp" else {}
    settings = f'kind = "{kind}"\nmicro_batch = 2\naccumulate = 3\nloss = "chunked"\n'
    settings += "".join(f"{name} = {value!r}\n" for name, value in more.items())
    train = "learning_rate = 2e-4\nweight_decay = 0.2\nclip_norm = 0.5\n"
    text = f'model = "gpt2"\ncluster = "8xH100-SXM"\n[strategy]\n{settings}[train]\n{train}'
    (tmp_path / "run.toml").write_text(text)
    words = ("export", "run.toml", "--to", "python", "-o", "train.py")
    assert shardwise(*words, folder=tmp_path).returncode == 0
    found = import_file(tmp_path / "train.py")
    expected = {"kind": kind, "micro_batch": 2, "accumulate": 3, "loss": "chunked", **more}
    assert {name: found.strategy[name] for name in expected} == expected
    wanted = {"learning_rate": 2e-4, "weight_decay": 0.2, "clip_norm": 0.5}
    assert wanted.items() <= found.train.items()
    assert "schedule" not in found.train
    assert not any("unknown to Shardwise" in loss for loss in found.unsupported)


def test_a_share_of_all_blocks_or_none_has_a_name() -> None:
    for share, loses in ((0.0, False), (1.0, False), (0.5, True)):
        strategy = {"kind": "zero3", "param_dtype": "fp32", "recompute": share}
        written = export(large(strategy=strategy))
        assert any(loss.startswith("recompute") for loss in written.unsupported) is loses


def test_a_bare_no_is_a_word_of_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    found = imported(tmp_path, "distributed_type: no\n", "a.yaml")
    assert (found.strategy["kind"], found.processes) == ("single", 1)
    with pytest.raises(SpecError, match=r"write a run\.toml"):
        imported(tmp_path, "distributed_type: TPU\n", "a.yaml")


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


SECTION = "[data]{0}source = 'evil:main'{0}[train.checkpoint]{0}to = 's3://evil'{0}#"


@pytest.mark.parametrize("line_end", ["\n", "\r", "\r\n", "\v", "\x85", "\u2028"])
def test_no_text_of_a_file_becomes_a_section(line_end: str, tmp_path: Path) -> None:
    """Its keys, its values and its own name are comments in the run.toml, whatever they hold."""
    section = f"x{line_end}{SECTION.format(line_end)}"
    table = {"distributed_type": "FSDP", section: 1, "fsdp_config": {section: 1}, "rdzv": section}
    file = tmp_path / f"{section.replace('/', '-')}.json"
    file.write_text(json.dumps(table))
    found = import_file(file)
    assert any("evil" in sentence for sentence in found.unsupported)
    parsed = tomllib.loads(imported_toml(found, file.name, None))
    assert set(parsed) == {"strategy"}
    run = imported_run(found, find_model("gpt2"), find_cluster("1x8xH100-SXM"))
    assert tomllib.loads(imported_toml(found, file.name, run)) == run_table(run)


TRL_SCRIPT = """
from trl import {name}Config, {name}Trainer
args = {name}Config(per_device_train_batch_size=2, beta=0.1)
{name}Trainer(model, args=args)
"""
OBJECTIVES = {
    "rloo.py": (TRL_SCRIPT.format(name="RLOO"), "RLOO"),
    "grpo.py": (TRL_SCRIPT.format(name="GRPO"), "GRPO"),
    "reward.py": (TRL_SCRIPT.format(name="Reward"), "reward modelling"),
    "fsdp.py": (HEAD + "FSDP(model)\nKTOTrainer(model)", "KTO"),
    "dpo.yaml": ("per_device_train_batch_size: 2\nmax_length: 512\nbeta: 0.1\n",
                 "preference optimisation"),
    "grpo.json": ('{"per_device_train_batch_size": 2, "num_generations": 8}', "GRPO"),
}  # fmt: skip


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_that_is_not_planned_is_warned_of_first(name: str, tmp_path: Path) -> None:
    text, objective = OBJECTIVES[name]
    with pytest.warns(SpecWarning, match="not supervised"):
        found = imported(tmp_path, text, name)
    assert found.objective == objective
    assert "loss" not in found.strategy  # which would be that of SFTTrainer
    first, *_ = imported_toml(found, name, None).splitlines()
    assert first.startswith(f"# Warning: {objective}")


def test_supervised_files_are_not_warned_of(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpecWarning)
        assert imported(tmp_path, TRL_SCRIPT.format(name="SFT"), "a.py").objective is None
        assert import_file(EXAMPLE).objective is None


def test_names_of_names_are_followed_once(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(HEAD + DOUBLING)
    assert import_file(file).strategy["kind"] == "zero3"


def test_large_files_are_not_read(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    with file.open("wb") as sparse:
        sparse.truncate(100 * 2**20)
    assert file.stat().st_size > MAX_BYTES
    with pytest.raises(SpecError, match="4,194,304 bytes"):
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
    from shardwise.planning.current import current_strategy
    from shardwise.spec.question import describe_run

    run = describe_run("llama-3-8b", "4x8xH100-SXM@400Gbps")
    hybrid = {"kind": "zero3", "replicate": 2, "shard": 8}
    written = "\n".join(f"{key} = {json.dumps(value)}" for key, value in hybrid.items())
    (tmp_path / "run.toml").write_text(f"[strategy]\n{written}\n")
    (tmp_path / "ds.json").write_text(
        '{"train_batch_size": 32, "zero_optimization": {"stage": 3, "mics_shard_size": 8}}'
    )
    for name in ("run.toml", "ds.json"):
        found = current_strategy(tmp_path / name, run)
        assert (found.shard, found.replicate) == (8, 4)


def test_the_page_shows_the_table_of_the_code() -> None:
    page = (ROOT / "docs" / "how-to" / "from-fsdp1.md").read_text()
    rows = [f"| `{setting}` | {becomes} |" for setting, becomes in fsdp1.table()]
    assert "\n".join(rows) in page
