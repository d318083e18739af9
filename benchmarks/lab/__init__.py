"""A cluster in a box: hosts that are network namespaces, joined by links of a chosen rate."""
