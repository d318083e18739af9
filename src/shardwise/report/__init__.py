"""Results as terminal screens and as one HTML page."""
