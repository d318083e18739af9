"""Silence import warnings and progress bars of transformers, peft and torchao."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# torchao warns of kernels that it cannot load, and torch of old functions that torchao calls.
_LOGGERS = ("torchao", "torch.utils")


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Hide the warnings of importing torchao, inside a context.

    transformers' models and peft import it.
    """
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def silence_transformers() -> None:
    """Turn off warnings of transformers, and progress bars of it and of huggingface_hub."""
    with quiet_imports():
        from transformers.utils import logging as library

        library.set_verbosity_error()  # type: ignore[no-untyped-call]
        library.disable_progress_bar()  # type: ignore[no-untyped-call]
