"""Format of a checkpoint: files of tensors, an index, a manifest, and where they are stored."""
