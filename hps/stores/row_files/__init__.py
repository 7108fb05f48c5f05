"""A persistent database of sealed row files."""
