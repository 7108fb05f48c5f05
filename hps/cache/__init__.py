"""The embedding cache: its contract (`base.py`), `cpu/` in NumPy and numba, and `cuda/`, its twin on a GPU."""
