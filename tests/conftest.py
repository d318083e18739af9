"""Settings and fixtures that all tests share."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.budget import record
from tests.examples import BY_DAY, BY_NIGHT
from tests.parts import PARTS, part_of_item
from tests.screens import UPDATE

# The gate tries the same examples every time; nightly tries new ones, and more of them.
# `.ci/nightly` prints the seed that repeats them.
settings.register_profile(
    "gate",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    max_examples=BY_DAY,
)
settings.register_profile(
    "nightly", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=BY_NIGHT
)
settings.load_profile("gate")

# Hub lookups would only time out; every test makes its models from configurations.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew")
    parser.addoption("--cpu", metavar="FOLDER", help="write the CPU time of each test there")
    parser.addoption("--part", choices=PARTS, help="run this part of nightly alone")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--update-golden"):
        os.environ[UPDATE] = "1"  # reaches the workers of pytest-xdist too
    folder = config.getoption("--cpu")
    if folder:
        record(config, Path(folder).absolute())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while tests are collected, and never in what lives from then on.

    Modules and tests stay to the end: to look through them again and again takes a fifth of the
    time of collecting.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timing"):
            item.add_marker("nightly")
    part = config.getoption("--part")
    if part:
        others = [item for item in items if part_of_item(item) != part]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if part_of_item(item) == part]


@pytest.fixture(scope="session")
def shared() -> Path:
    """Tables, traces and texts that lie beside the project; of the tables, figures are shipped."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("needs the shared folder beside the project")
    return folder


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that holds `make`, what the documentation is made with."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[1] / "docs")
