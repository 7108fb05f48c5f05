"""HTTP routes of the engine: all but lookups."""
