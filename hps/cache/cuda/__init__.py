"""The embedding cache on a GPU: the only package that imports CuPy."""
