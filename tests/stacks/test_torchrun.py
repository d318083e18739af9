"""The command line of torchrun, as torchrun itself reads it."""

from __future__ import annotations

import pytest

from shardwise.spec.lookup import find_cluster
from shardwise.stacks.write.torchrun import script_command, torchrun
from tests.stacks.runs import large, tiny


@pytest.mark.parametrize("cluster", ["8xH100-SXM", "2x4xCPU"])
@pytest.mark.parametrize("program", ["train.py", "-m torchtitan.train --module it --config run"])
def test_torchrun_reads_it(cluster: str, program: str) -> None:
    run = pytest.importorskip("torch.distributed.run")
    found = find_cluster(cluster)
    first, *words = torchrun(found, program).split()
    assert first == "torchrun"
    read = run.get_args_parser().parse_args(words)
    assert read.nproc_per_node == str(found.devices_per_node)
    # Without a word it is one node, which needs nobody to meet.
    assert read.nnodes == ("1:1" if found.nodes == 1 else str(found.nodes))
    assert read.rdzv_endpoint == ("" if found.nodes == 1 else "HOST:29400")
    *_, script = program.removeprefix("-m ").split(" --")[0].split()
    assert read.training_script == script
    assert read.module == program.startswith("-m ")
    assert read.training_script_args == program.split(script, 1)[1].split()


def test_one_process_needs_no_launcher() -> None:
    alone = tiny(cluster="1x1xCPU", strategy={"kind": "single"})
    assert script_command(alone, "train.py") == "python train.py"
    assert script_command(large(), "train.py").startswith("torchrun --nnodes 2 ")
