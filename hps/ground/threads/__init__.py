"""Threads: workers, pools, what is closed at exit, pauses."""
