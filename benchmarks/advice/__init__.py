"""Questions that an expert in large-scale training would ask, and what the expert accepts."""
