"""Runs that users measured and contributed: checked, judged, and fitted by a frozen protocol."""
