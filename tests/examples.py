"""How many examples hypothesis tries: by day a tenth of what it tries by night."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

BY_DAY, BY_NIGHT = 20, 200
# Fewer find nothing that one example does not.
FEWEST = 5


def examples(by_night: int, **more: Any) -> settings:
    """Settings of a test whose cases are cheaper or dearer than others."""
    number = by_night * settings().max_examples // BY_NIGHT
    return settings(max_examples=max(number, min(FEWEST, by_night)), **more)
