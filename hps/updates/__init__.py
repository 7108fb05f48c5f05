"""Logs of online updates: the contract (`base.py`), Kafka and Redis Streams, framing, the feed and the publisher."""
