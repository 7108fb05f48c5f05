"""Commands that read and write tables."""
