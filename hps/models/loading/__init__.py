"""Model files into databases and caches."""
