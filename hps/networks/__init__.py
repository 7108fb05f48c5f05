"""Dense networks: what runs them, by the format of their files. `base.py` is the manual."""
