"""Newcomers' walks: scripts that use nothing but README and the pages they name."""
