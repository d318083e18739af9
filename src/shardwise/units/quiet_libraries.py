"""transformers, peft and torchao without the warnings of their imports and their progress bars."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# torchao names the kernels that it cannot load, and torch what torchao still calls of it.
_LOGGERS = ("torchao", "torch.utils")


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Hide warnings that the import of torchao causes: transformers' models and peft import it."""
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
    """Turn off the warnings of transformers, and its progress bars and those of huggingface_hub."""
    with quiet_imports():
        from transformers.utils import logging as library

        library.set_verbosity_error()  # type: ignore[no-untyped-call]
        library.disable_progress_bar()  # type: ignore[no-untyped-call]
