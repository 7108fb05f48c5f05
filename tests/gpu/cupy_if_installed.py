"""CuPy and its cache for tests that are marked `gpu`, which are skipped where CuPy is not installed."""

import importlib.util
from typing import Any

cupy: Any = None
CupyCache: Any = None
if importlib.util.find_spec("cupy"):
    import cupy

    from hps.cache.cuda.cache import CupyCache

__all__ = ["CupyCache", "cupy"]
