"""Settings and fixtures that all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.screens import UPDATE

# The gate tries the same examples every time; nightly tries new ones, and more of them.
# `.ci/nightly` prints the seed that repeats them.
settings.register_profile(
    "gate",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    max_examples=40,
)
settings.register_profile(
    "nightly", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=200
)
settings.load_profile("gate")

# Hub lookups would only time out; every test makes its models from configurations.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--update-golden"):
        os.environ[UPDATE] = "1"  # reaches the workers of pytest-xdist too


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timing"):
            item.add_marker("nightly")


@pytest.fixture(scope="session")
def shared() -> Path:
    """Measured runs, traces and texts that lie beside the project and are never copied into it."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("needs the shared folder beside the project")
    return folder
