"""Decide when a run is saved by time: early at first, then every `minutes`.

A crash costs the work since the last save. The best interval is the square root of twice the cost
of a save times the mean time between failures (Young 1974, Daly 2006). A save in the background
costs little (docs/reliability.md), and how often a run fails is not known when it starts. So
intervals double from FIRST_S: until they reach the usual one, a crash loses at most half of the
run.
"""

from __future__ import annotations

# Seconds before the first save; a restart takes several.
FIRST_S = 10.0
# The largest share of the time that writing early saves may take.
MAX_SHARE = 0.2


class SavePace:
    """Decides when the next save is due. Times are seconds of one monotonic clock."""

    def __init__(self, minutes: float, now: float, *, early: bool) -> None:
        """Plan saves every `minutes`, none if 0; with `early` the first ones are closer."""
        self._usual_s, self._early = 60 * minutes, early
        self._started = self._saved = now
        # Seconds that the last save took; None while it is written.
        self._save_s: float | None = 0.0

    def saved(self, now: float) -> None:
        """Record that a save has begun."""
        self._saved, self._save_s = now, None

    def is_due(self, now: float) -> bool:
        """Whether to save now; called while no save is being written.

        The first call after a save began takes the time since then as the time that the save took.
        """
        if self._save_s is None:
            self._save_s = now - self._saved
        return self._usual_s > 0 and now - self._saved > self._interval_s(self._save_s)

    def _interval_s(self, save_s: float) -> float:
        """Seconds from the last save to the next, if the last one took `save_s` to write."""
        if not self._early:
            return self._usual_s
        run_s = self._saved - self._started
        return min(self._usual_s, max(FIRST_S, run_s, save_s / MAX_SHARE))
