"""Commands that write, check and plan a configuration."""
