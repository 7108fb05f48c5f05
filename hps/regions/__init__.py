"""Shared memory between front processes and the owner of the tiers; `layout.py` reads like its manual."""
