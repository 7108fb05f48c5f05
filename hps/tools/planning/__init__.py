"""Predicts, before anything is loaded, the memory that a configuration needs by tier and its hit rates by cache size."""
