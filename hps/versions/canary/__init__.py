"""Canaries and shadows: a new version answers a share of a model's requests, and is promoted or taken back."""
