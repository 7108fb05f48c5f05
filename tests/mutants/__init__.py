"""Bugs that the tests must notice, one patch each; see `__main__.py`."""
