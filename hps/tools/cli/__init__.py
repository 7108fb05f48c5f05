"""The command `hps`: one command a module."""
