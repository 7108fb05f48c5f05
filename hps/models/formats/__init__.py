"""Files that `hps import` reads: the contract (`base.py`), NumPy, safetensors, PyTorch, Parquet, and what trainers write."""
