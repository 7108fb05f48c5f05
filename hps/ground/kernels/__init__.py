"""Numba kernels: compiling, caching, atomics."""
