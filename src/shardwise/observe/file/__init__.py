"""Read a trace file into columns: decompress, decode, cache."""
