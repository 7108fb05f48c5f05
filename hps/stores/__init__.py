"""The host tiers: their contract (`base.py`), `hash_map/`, `redis/` and `rocks_db/`."""
