"""Export runs to other training stacks, and import their files."""
