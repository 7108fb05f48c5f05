"""A soak: good and bad clients, online updates and chaos against several processes on one Redis, with every answer judged.

`python -m benchmarks.soak --minutes 20`, or `make soak MINUTES=20`; docs/soak.md says what is judged, and how.
"""
