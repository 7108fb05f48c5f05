"""Measures lookups, in process and over HTTP: `hps profile`.

keys.py        what is asked: drawn or recorded keys
times.py       how long each took
in_process.py  threads that call an `HPS`
http_load.py   a load generator: requests over a few connections, one after the other or at a fixed rate
service.py     a running service under that load
counters.py    what the server counted meanwhile: stages and tiers
profile.py     the figures, and the bounds that they must keep
pictures.py    drawn
"""
