"""Why a run is slow: every lost nanosecond gets a cause, and causes become verdicts."""
