"""Reads and checks `ps.json` and HugeCTR's structs; nothing else reads files or the environment for settings."""
