"""Why a run is slow: every lost nanosecond gets a reason, and reasons become verdicts."""
