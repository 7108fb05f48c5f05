"""Shared memory between frontends and the engine; `layout.py` describes it."""
