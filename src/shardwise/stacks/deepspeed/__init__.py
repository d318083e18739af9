"""The keys of a DeepSpeed JSON, for reading and writing. Checked against DeepSpeed 0.19."""
