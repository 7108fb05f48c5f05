"""Frontend processes: they own the sockets and speak HTTP with clients. They know nothing of tiers."""
