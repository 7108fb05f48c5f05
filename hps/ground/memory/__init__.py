"""Memory: sizes, limits, heaps, bounded caches."""
