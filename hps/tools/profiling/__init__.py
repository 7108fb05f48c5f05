"""Measures lookups, in process and over HTTP: `hps profile`.

keys.py        drawn or recorded keys to look up
times.py       histograms of durations
in_process.py  threads that call an `HPS`
http_load.py   a load generator: requests over a few connections, back to back or at a fixed rate
service.py     a running service under that load
counters.py    the server's counters of stages and tiers over that time
profile.py     the figures and their bounds
"""
