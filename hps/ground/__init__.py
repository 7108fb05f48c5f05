"""The base of every part, independent of tiers: threads, lifetimes, limits, numba kernels, key sets."""
