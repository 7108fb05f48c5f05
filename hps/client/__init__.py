"""Clients of a remote server: `hps.connect` and `hps.connect_async`."""
