from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import shardwise
from tests.command import shardwise as run
from tests.screens import assert_screen

BASIC = ["--model", "llama-3-8b", "--cluster", "4x8xH100-SXM@400Gbps", "--seq-len", "8192"]


@cache
def estimate_json(*arguments: str) -> dict[str, Any]:
    done = run("estimate", *arguments, "--json")
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def test_json_has_the_documented_shape() -> None:
    profile = estimate_json(*BASIC)
    assert profile["schema"] == 1
    assert profile["provenance"] == {
        "kind": "predicted",
        "shardwise": shardwise.__version__,
        "from": "formulas",
    }
    assert profile["model"] == {"name": "llama-3-8b", "parameters": 8_030_261_248}
    assert profile["cluster"]["devices"] == 32
    assert profile["strategy"]["kind"] == "zero3"
    memory = profile["memory"]
    assert set(memory["terms"]) == {
        *("parameters", "gradients", "optimizer", "unsharded_parameters", "unsharded_gradients"),
        *("reduce_buffers", "activations", "logits", "other"),
    }
    assert sum(memory["terms"].values()) == memory["peak_allocated_bytes"]
    assert memory["peak_phase"] in memory["phases"]
    assert max(memory["phases"].values()) == memory["peak_allocated_bytes"]
    assert {"fits", "capacity_bytes", "peak_reserved_bytes"} <= set(memory)
    for collective in profile["traffic"]:
        assert {"op", "group", "calls", "bytes"} <= set(collective)
    assert {"step_s", "compute_s", "exposed_communication_s"} <= set(profile["time"])
    assert {"tokens_per_s", "mfu", "hfu", "mfu_convention"} <= set(profile["throughput"])
    assert profile["bottleneck"] in ("memory", "bandwidth", "latency", "compute")
    assert "null" not in json.dumps(profile)


def test_python_and_the_command_agree() -> None:
    profile = shardwise.estimate("llama-3-8b", "4x8xH100-SXM@400Gbps", seq_len=8192)
    assert profile.to_dict() == estimate_json(*BASIC)


def test_exit_codes() -> None:
    assert run("estimate", *BASIC, "--recompute", "full").returncode == 0
    assert (
        run(
            "estimate", "--model", "llama-3-70b", "--cluster", "8xH100-SXM", "--strategy", "zero2"
        ).returncode
        == 1
    )
    assert run("estimate", "--model", "llama-3-70b").returncode == 2
    assert run("estimate", "--no-such-option").returncode == 2


CPU = str(Path(__file__).with_name("cpu-64GiB.toml"))
SCREENS = {
    "fits": [*BASIC, "--recompute", "full"],
    "at-risk": ["--model", "llama-3-8b", "--cluster", "8xH100-SXM", "--seq-len", "8192"],
    "does-not-fit": [
        *("--model", "llama-3-70b", "--cluster", "8x8xH100-SXM@400Gbps", "--strategy", "zero2"),
    ],
    # A cluster named CPU would have the memory of this machine.
    "cpu": ["--model", "gpt2", "--cluster", CPU, "--precision", "fp32", "--seq-len", "128"],
    "hybrid": [
        *("--model", "llama-3-8b", "--cluster", "4x8xH100-SXM@400Gbps", "--strategy", "hsdp"),
        *("--seq-len", "4096", "--accumulate", "4", "--recompute", "selective"),
    ],
    "moe": [
        *("--model", "mixtral-8x7b", "--cluster", "8x8xH100-SXM@400Gbps", "--recompute", "full"),
    ],
    "moe-qlora": [
        *("--model", "mixtral-8x7b", "--cluster", "8xH100-SXM", "--strategy", "zero3"),
        *("--adapter", "qlora:16"),
    ],
    # 48 devices divide neither the experts nor their rows.
    "moe-padded": [
        *("--model", "mixtral-8x7b", "--cluster", "6x8xH100-SXM@400Gbps", "--recompute", "full"),
    ],
}
VERDICTS = {
    "at-risk": "at risk",
    "does-not-fit": "does not fit",
    "moe-padded": "does not fit",
}


@pytest.mark.parametrize("name", SCREENS)
def test_screens(name: str) -> None:
    done = run("estimate", *SCREENS[name])
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    verdict = VERDICTS.get(name, "fits")
    assert estimate_json(*SCREENS[name])["memory"]["verdict"] == verdict
    assert done.returncode == (1 if verdict == "does not fit" else 0)
    assert_screen(f"estimate-{name}", done.stdout)


def test_nothing_fits_whose_tensors_fill_the_device() -> None:
    """405B: tensors take 99 % of an H100 in groups of 2,048, which is at risk, and 101 % in groups
    of 1,024.
    """
    told = (
        *("estimate", "--model", "llama-3.1-405b", "--cluster", "2048x8xH100-SXM@400Gbps"),
        *("--seq-len", "8192", "--recompute", "full", "--json", "--strategy"),
    )
    for group, expected in (("2048", ("at risk", True, 0)), ("1024", ("does not fit", False, 1))):
        done = run(*told, f"zero3:{group}")
        memory = json.loads(done.stdout)["memory"]
        assert memory["peak_allocated_bytes"] > 0.96 * memory["capacity_bytes"]
        assert (memory["verdict"], memory["fits"], done.returncode) == expected


def test_one_measure_of_memory() -> None:
    """What is needed is tensors and overhead; the verdict compares that with what is usable."""
    for arguments in SCREENS.values():
        memory = estimate_json(*arguments)["memory"]
        overhead = memory["needed_bytes"] - memory["peak_allocated_bytes"]
        on_cpus = CPU in arguments
        assert overhead == 0 if on_cpus else overhead > 0
        assert (memory["verdict"] == "fits") == (memory["needed_bytes"] <= memory["usable_bytes"])
        # A process holds at least 0.5 GiB beside its tensors.
        assert memory["usable_bytes"] <= memory["capacity_bytes"] - 2**29


def test_bytes_are_whole_numbers() -> None:
    def check(value: Any, key: str = "") -> None:
        if isinstance(value, dict):
            for name, part in value.items():
                check(part, f"{key}.{name}")
        elif isinstance(value, list):
            for part in value:
                check(part, key)
        elif "bytes" in key or "memory.terms" in key or "memory.phases" in key:
            assert isinstance(value, int), key

    for arguments in SCREENS.values():
        check(estimate_json(*arguments))


def test_every_problem_is_one_line_and_no_traceback() -> None:
    done = run(
        *("estimate", "--model", "lama-3-8b", "--cluster", "4x8xH10-SXM@400Gbs"),
        *("--strategy", "zerro3", "--seq-len", "x", "--recompute", "fulll"),
    )
    assert done.returncode == 2
    problems = done.stderr.strip().splitlines()
    assert all(problem.startswith("error: ") for problem in problems)
    for hint in ("'llama-3-8b'", "'H100-SXM'", "400Gbps", "'zero3'", "job.seq_len", "recompute"):
        assert any(hint in problem for problem in problems), hint


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--model", "llama-3-8b", "--cluster", "8xH100-SXM", "--strategy", "single"],
            "choose ddp",
        ),
        (
            ["--model", "llama-3-8b", "--cluster", "8xH100-SXM", "--strategy", "zero3:3"],
            "groups of 3 do not divide 8 devices; use 1, 2, 4 or 8",
        ),
        (
            ["--model", "gpt2", "--cluster", "H100-SXM", "--seq-len", "4096"],
            "exceeds the 1024 learned positions",
        ),
        (["--model", "llama-3-8b", "--cluster", "8xH100-SXM", "--micro-batch", "0"], "micro_batch"),
        (["--model", "nowhere/config.json", "--cluster", "8xH100-SXM"], "no file or folder"),
        (["missing.toml"], "cannot read missing.toml"),
        (["--model", "llama-3-8b", "--cluster", "4x8xH100-SXM@400"], "has no unit"),
        (
            [
                "--model",
                "llama-3-8b",
                "--cluster",
                "8xH100-SXM",
                "--accumulate",
                "9223372036854775807",
            ],
            "must be at most 1,048,576",
        ),
        (
            [
                "--model",
                "llama-3-8b",
                "--cluster",
                "8xH100-SXM",
                "--accumulate",
                "2",
                "--global-batch",
                "4M",
            ],
            "give one of the two",
        ),
        (
            ["--model", "llama-3-8b", "--cluster", "8xH100-SXM", "--strategy", "zero3:1"],
            "choose ddp",
        ),
        (
            ["--model", "llama-3-8b", "--cluster", "8xH100-SXM", "--recompute", "Fulll"],
            "did you mean 'full'",
        ),
        (
            ["--model", "meta-llama/Meta-Llama-3-8B/config.json", "--cluster", "8xH100-SXM"],
            "no file or folder",
        ),
        (
            ["--model", "llama-3-8b", "--cluster", "8xH100-SXM", "--global-batch", "10"],
            "less than half of one",
        ),
        (
            ["--model", "nowhere.models:make", "--cluster", "8xH100-SXM"],
            "cannot import nowhere.models:make",
        ),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str) -> None:
    done = run("estimate", *arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_run_file_with_one_thing_changed(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        'model = "llama-3-8b"\ncluster = "8xH100-SXM"\n[job]\nseq_len = 2048\n'
        '[strategy]\nkind = "zero2"\nmicro_batch = 2\nrecompute = "full"\n'
    )
    file = str(tmp_path / "run.toml")
    plain = estimate_json(file)
    assert (plain["strategy"]["kind"], plain["strategy"]["micro_batch"]) == ("zero2", 2)
    changed = estimate_json(file, "--strategy", "zero3", "--micro-batch", "4")
    assert (changed["strategy"]["kind"], changed["strategy"]["micro_batch"]) == ("zero3", 4)
    assert changed["strategy"]["recompute"] == "full"
    assert changed["strategy"]["reshard_after_forward"] is True


def test_a_global_batch_sets_the_accumulation() -> None:
    profile = estimate_json(*BASIC, "--global-batch", "4Mi")
    assert profile["strategy"]["accumulate"] == 16
    assert profile["work"]["tokens"] == 4 * 2**20


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    from shardwise.spec import catalogue
    from shardwise.spec.huggingface import to_config

    (tmp_path / "config.json").write_text(json.dumps(to_config(catalogue.model("llama-3-8b"))))
    profile = estimate_json("--model", str(tmp_path), "--cluster", "8xH100-SXM")
    assert profile["model"]["parameters"] == 8_030_261_248


def test_a_module_of_ones_own(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "own.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))\n"
        "    def forward(self, x):\n"
        "        for layer in self.layers:\n"
        "            x = layer(x).relu()\n"
        "        return x\n"
        "    def example_inputs(self, batch, seq_len):\n"
        "        import torch\n"
        "        return (torch.zeros(batch, seq_len, 64, requires_grad=True),)\n"
        "def make():\n"
        "    return Net()\n"
    )
    done = run(
        "estimate",
        "--model",
        "own:make",
        "--cluster",
        "2xCPU",
        "--precision",
        "fp32",
        "--json",
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    profile = json.loads(done.stdout)
    assert profile["model"]["parameters"] == 4 * (64 * 64 + 64)
    assert profile["provenance"]["from"] == "traced module"


def test_version_and_help() -> None:
    assert run("--version").stdout.strip() == f"shardwise {shardwise.__version__}"
    assert "estimate" in run("--help").stdout
    assert "catalog" in run("-h").stdout


def test_a_reader_that_goes_away_and_a_disk_that_is_full() -> None:
    command = f"{sys.executable} -m shardwise catalog"
    head = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -1"],
        capture_output=True,
        text=True,
        check=False,
    )
    # Ended by the signal, as other commands are; not "the answer is no".
    assert head.returncode in (0, 141)
    assert "Traceback" not in head.stderr
    full = subprocess.run(
        ["bash", "-c", f"{command} > /dev/full"], capture_output=True, text=True, check=False
    )
    # A full disk is no wrong input, and the answer is not known to be yes.
    assert full.returncode == 1
    assert full.stderr.splitlines() == ["error: cannot write: No space left on device"]


def test_a_terminal_without_unicode() -> None:
    done = run("estimate", *BASIC, PYTHONIOENCODING="ascii")
    assert done.returncode in (0, 1)
    assert "Traceback" not in done.stderr


HOSTS = [
    *("--model", "llama-3-70b", "--cluster", "4x8xH100-SXM@400Gbps", "--seq-len", "4096"),
    *("--recompute", "full", "--global-batch", str(96 * 4096)),
]


def test_screen_of_each_number_of_hosts() -> None:
    done = run("estimate", *HOSTS, "--nnodes", "1:5")
    assert_screen("estimate-hosts", done.stdout)


def test_each_number_of_hosts_is_predicted_like_a_cluster_of_that_size() -> None:
    """The degrees of the strategy follow each size; 96 sequences are 3 for each of 32 devices."""
    sizes = {
        one["hosts"]: one
        for one in json.loads(run("estimate", *HOSTS, "--nnodes", "1:5", "--json").stdout)
    }
    assert {hosts: one["accumulate"] for hosts, one in sizes.items() if not one["problem"]} == {
        4: 3,
        3: 4,
    }
    for hosts in (3, 4):
        alone = estimate_json(*HOSTS, "--cluster", f"{hosts}x8xH100-SXM@400Gbps")
        assert sizes[hosts]["step_s"] == alone["time"]["step_s"]
        assert sizes[hosts]["memory_bytes"] == alone["memory"]["needed_bytes"]
    assert "does not fit" in sizes[1]["problem"]
    assert "job.global_batch" in sizes[5]["problem"]


def test_one_number_of_hosts_needs_no_global_batch() -> None:
    done = run("estimate", *BASIC, "--nnodes", "2")
    assert done.stdout.startswith("llama-3-8b on 2 hosts, predicted")


def test_a_trace_of_several_sizes_is_refused() -> None:
    done = run("estimate", *HOSTS, "--nnodes", "1:4", "--trace", "step.json")
    assert done.returncode == 2
    assert "leave out --nnodes" in done.stderr
