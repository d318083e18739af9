"""What a checkpoint is: files of tensors, an index, a manifest, and the place they lie in."""
