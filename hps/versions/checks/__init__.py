"""Checks of a version between its load and its takeover: its rows, scores and expected answers, and the report of them."""
