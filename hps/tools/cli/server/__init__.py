"""Commands that start a server or talk to one."""
