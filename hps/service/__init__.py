"""HTTP and nothing but HTTP: requests to lookups, and answers from the memory that a lookup wrote."""
