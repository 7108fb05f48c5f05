"""A soak: good and bad clients, online updates and chaos against several processes on one Redis, with every answer judged.

`python -m tests.nightly.soak --minutes 20`, or `make soak MINUTES=20`; docs/measured.md says what is judged, and how.
"""
