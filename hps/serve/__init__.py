"""The HTTP service: requests become lookups, and answers are sent from the memory that a lookup wrote."""
