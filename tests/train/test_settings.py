"""[train] and [data]: the schedule, what is refused, and who is who under a launcher."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shardwise.launch.slurm import adopt_slurm
from shardwise.spec.record import SpecError
from shardwise.spec.train import DataSettings, TrainSettings


def test_warm_up_then_cosine() -> None:
    settings = TrainSettings(steps=110, warmup_steps=10, learning_rate=1.0, final_learning_rate=0.2)
    assert settings.learning_rate_at(0) == pytest.approx(0.1)
    assert settings.learning_rate_at(9) == pytest.approx(1.0)
    assert settings.learning_rate_at(60) == pytest.approx(0.2 + 0.8 * 0.5)
    assert settings.learning_rate_at(110) == pytest.approx(0.2)
    quarter = 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4))
    assert settings.learning_rate_at(35) == pytest.approx(quarter)
    flat = settings.but(schedule="constant")
    assert flat.learning_rate_at(3) == pytest.approx(0.4)
    assert flat.learning_rate_at(109) == 1.0


def test_linear_decay() -> None:
    """From the first step after the warm-up on a line to the final share, as Hugging Face's."""
    settings = TrainSettings(
        steps=110, warmup_steps=10, learning_rate=2.0, schedule="linear", final_learning_rate=0.2
    )
    assert settings.learning_rate_at(4) == pytest.approx(1.0)
    assert settings.learning_rate_at(10) == pytest.approx(2.0)
    assert settings.learning_rate_at(60) == pytest.approx(2.0 * (0.2 + 0.8 / 2))
    assert settings.learning_rate_at(110) == pytest.approx(0.4)
    torch = pytest.importorskip("torch")
    optimization = pytest.importorskip("transformers.optimization")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    theirs = optimization.get_linear_schedule_with_warmup(optimizer, 10, 110)
    to_zero = settings.but(final_learning_rate=0.0)
    for step in range(110):
        # Theirs starts its warm-up from 0.
        if step >= 10:
            assert theirs.get_last_lr() == pytest.approx([to_zero.learning_rate_at(step)])
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 5, "warmup_steps": 6}, "warmup_steps 6 .* steps 5"),
        ({"lerning_rate": 1}, "did you mean 'learning_rate'"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"trackers": ["tensorbord"]}, "'tensorbord' is not one of tensorboard, wandb, mlflow"),
        ({"learning_rate": 0}, "must be more than 0"),
    ],
)
def test_what_train_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        TrainSettings.read(fields, where="train")


def test_data_has_one_origin() -> None:
    assert DataSettings.read({"path": "a.txt"}).path == ("a.txt",)
    with pytest.raises(SpecError, match="exclude each other"):
        DataSettings.read({"path": "a.txt", "source": "a:b"})


def test_slurm_says_who_a_process_is() -> None:
    environment = {
        "SLURM_PROCID": "13",
        "SLURM_NTASKS": "20",
        "SLURM_LOCALID": "5",
        "SLURM_NODEID": "1",
        "SLURM_TASKS_PER_NODE": "8(x2),4",
        "SLURM_JOB_ID": "41234",
        "SLURM_STEP_NODELIST": "alone",
    }
    assert adopt_slurm(environment)
    assert environment["RANK"] == "13"
    assert environment["WORLD_SIZE"] == "20"
    assert environment["LOCAL_RANK"] == "5"
    assert environment["LOCAL_WORLD_SIZE"] == "8"
    assert environment["MASTER_ADDR"] == "alone"
    assert environment["MASTER_PORT"] == "21234"
    assert not adopt_slurm(environment)  # now it is a worker like any other
    assert not adopt_slurm({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"})
    assert not adopt_slurm({})
