"""`shardwise export` and `shardwise import`: commands that name the written file, and screens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.predict.api import estimate_run
from shardwise.spec.record import SpecError
from shardwise.spec.run import read_run
from shardwise.stacks.write.exported import Target
from shardwise.stacks.write.exports import STACKS, export_run
from tests.command import shardwise
from tests.screens import assert_screen
from tests.stacks.runs import large

RUN = """\
model = "llama-3-8b"
cluster = "8x8xH100-SXM@50Gbps"
strategy = "zero2:8"
[job]
seq_len = 4096
global_batch = "2Mi"
[train]
steps = 1000
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    file = tmp_path / "b.toml"
    file.write_text(RUN)
    return file


@pytest.mark.parametrize("stack", STACKS)
def test_the_start_command_names_the_written_file(stack: str) -> None:
    usual = export_run(large(), stack)
    suffix = Path(usual.name).suffix
    written = export_run(large(), stack, Target(file=f"mine{suffix}"))
    name = "mine" if stack == "torchtitan" else f"mine{suffix}"
    assert name in written.command.split()
    assert usual.name not in written.command


def test_a_name_with_spaces_stays_one_word() -> None:
    written = export_run(large(), "accelerate", Target(file="my files/a b.yaml"))
    assert "'my files/a b.yaml'" in written.command


def test_torchtitan_imports_its_file_from_where_it_lies() -> None:
    written = export_run(large(), "torchtitan", Target(file="configs/mine.py"))
    assert written.command.startswith("PYTHONPATH=configs ")
    assert "--module mine " in written.command
    with pytest.raises(SpecError, match="output: "):
        export_run(large(), "torchtitan", Target(file="my-run.py"))


def test_slurm_is_asked_for_what_the_options_say() -> None:
    target = Target(run_file="b.toml", partition="gpu,long", account="lab-7", time="2-00:00:00")
    lines = export_run(large(), "slurm", target).text.splitlines()
    assert {
        *("#SBATCH --partition=gpu,long", "#SBATCH --account=lab-7", "#SBATCH --time=2-00:00:00"),
        "RUN=${1:-b.toml}",
    } <= set(lines)
    wrong = Target(partition="a b"), Target(account="x\n#SBATCH --nodes=9"), Target(time="soon")
    for bad in wrong:
        with pytest.raises(SpecError):
            export_run(large(), "slurm", bad)


def test_figures_are_those_of_the_strategy_in_the_stack(run: Path) -> None:
    """zero2 in groups of 8 becomes 64-way in DeepSpeed, which is neither silent nor free."""
    done = shardwise("export", "b.toml", "--to", "deepspeed", "-o", "ds.json", "--json",
                     folder=run.parent)  # fmt: skip
    printed = json.loads(done.stdout)
    assert printed["changed"]["shard"] == {"run": 8, "stack": 64}
    assert printed["applied"]["shard"] == 64
    described = read_run(run).resolved()
    flat = described._replace(
        strategy=described.strategy.but(shard=64, replicate=1, grad_sync="every")
    )
    for key, expected in (("run", estimate_run(described)), ("stack", estimate_run(flat))):
        figures = printed["predicted"][key]
        assert expected.throughput is not None
        assert figures["tokens_per_s"] == pytest.approx(expected.throughput.tokens_per_s)
        assert figures["needed_bytes"] == expected.known_memory.needed_bytes
    assert printed["command"].endswith("ds.json")
    assert (run.parent / "ds.json").read_text() == printed["text"]


def test_a_plan_for_a_stack_is_exported_as_it_is(run: Path) -> None:
    done = shardwise("plan", "b.toml", "--for", "deepspeed", "-o", "p.toml", "--json",
                     folder=run.parent)  # fmt: skip
    planned = json.loads(done.stdout)
    assert planned["for_stack"] == "deepspeed"
    done = shardwise("export", "p.toml", "--to", "deepspeed", "--json", folder=run.parent)
    written = json.loads(done.stdout)
    assert written["changed"] == {}
    assert written["predicted"]["run"] == written["predicted"]["stack"]


def test_scheduler_options_belong_to_slurm(run: Path) -> None:
    done = shardwise("export", "b.toml", "--to", "accelerate", "--time", "1:00", folder=run.parent)
    assert done.returncode == 2


SCREENS = {"deepspeed": "ds.json", "accelerate": "my.yaml", "trainer": "args.json",
           "slurm": "job.sbatch"}  # fmt: skip


@pytest.mark.parametrize("stack", SCREENS)
def test_screens_of_export(stack: str, run: Path) -> None:
    done = shardwise("export", "b.toml", "--to", stack, "-o", SCREENS[stack], folder=run.parent)
    assert done.returncode == 0
    assert done.stdout == ""
    assert_screen(f"export-{stack}", done.stderr)


FINE_TUNING = {"trl": "sft.yaml", "axolotl": "lora.yaml", "llama-factory": "lf.yaml",
               "trainer": "lora.py"}  # fmt: skip


@pytest.mark.parametrize("stack", FINE_TUNING)
def test_screens_of_export_with_adapters(stack: str, tmp_path: Path) -> None:
    """Without the figures, which are those of `estimate`."""
    (tmp_path / "q.toml").write_text(
        'adapter = "qlora:16"\n' + RUN.replace('"8x8xH100-SXM@50Gbps"', '"8xH100-SXM"')
    )
    done = shardwise("export", "q.toml", "--to", stack, "-o", FINE_TUNING[stack], folder=tmp_path)
    assert done.returncode == 0
    _, _, said = done.stderr.partition("\nNot expressible")
    assert_screen(f"export-{stack}-adapter", f"Not expressible{said}")


def test_screen_of_import_with_adapters(tmp_path: Path) -> None:
    (tmp_path / "q.yaml").write_text(
        "base_model: meta-llama/Llama-3.1-8B\nadapter: qlora\nload_in_4bit: true\nlora_r: 32\n"
        "lora_alpha: 16\nlora_target_linear: true\nsequence_len: 4096\nsample_packing: true\n"
        "micro_batch_size: 2\ngradient_accumulation_steps: 4\nbf16: auto\n"
        "gradient_checkpointing: true\nlearning_rate: 2e-4\nwarmup_ratio: 0.1\n"
    )
    done = shardwise("import", "q.yaml", "--model", "llama-3-8b", "--cluster", "8xH100-SXM",
                     "-o", "run.toml", folder=tmp_path)  # fmt: skip
    assert done.returncode == 0
    assert read_run(tmp_path / "run.toml").adapter is not None
    assert_screen("import-axolotl", done.stdout + done.stderr)


def test_screen_of_import(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "from trl import SFTConfig\nargs = SFTConfig(per_device_train_batch_size=2, "
        "learning_rate=rate(), max_length=4096, fsdp='full_shard', use_peft=True)\n"
    )
    done = shardwise("import", "train.py", "--model", "llama-3-8b", "--cluster", "8xH100-SXM",
                     "-o", "run.toml", folder=tmp_path)  # fmt: skip
    assert done.returncode == 0
    assert_screen("import-sft", done.stdout + done.stderr)
