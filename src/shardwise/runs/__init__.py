"""Past and present runs of a folder or bucket, from one small file per run."""
