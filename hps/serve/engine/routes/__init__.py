"""The HTTP routes beside the lookups."""
