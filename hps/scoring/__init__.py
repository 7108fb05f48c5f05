"""Scores: the inputs of a network, lookups and the network as one call, and batches of requests."""
