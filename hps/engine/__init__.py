"""The hot path: sessions, the chain of databases, and the ordering of reads and modifications."""
