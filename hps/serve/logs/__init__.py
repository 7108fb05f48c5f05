"""Log lines, reports and spans of requests and changes."""
