"""A cluster on one machine: hosts are network namespaces, joined by links with a set rate."""
