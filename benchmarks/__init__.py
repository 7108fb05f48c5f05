"""Benchmarks of hps: `python -m benchmarks NAME`; see harness.py."""
