"""A trace file as columns: decompressed, decoded and kept, whatever its layout."""
