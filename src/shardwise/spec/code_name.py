"""Names of functions that the user wrote: `package.module:name`, imported or put into scripts."""

from __future__ import annotations

from keyword import iskeyword
from typing import Annotated

from pydantic import AfterValidator


def _check(text: str) -> str:
    module, _, name = text.partition(":")
    parts = (*module.split("."), name)
    if not all(part.isidentifier() and not iskeyword(part) for part in parts):
        raise ValueError("must be of the form package.module:name, names of Python all of them")
    return text


CodeName = Annotated[str, AfterValidator(_check)]
