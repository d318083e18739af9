"""The ranks that tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.workers import Workers

pytest.register_assert_rewrite("tests.distributed.agreement")


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Gloo ranks, started by the first case that needs them, by a fork that takes no time.

    They end with a file of tests: what refers to a process group keeps its threads awake.
    """
    started = Workers(tmp_path_factory.mktemp("workers"))
    yield started
    started.close()
