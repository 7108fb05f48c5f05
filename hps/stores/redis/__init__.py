"""Redis, one server or a cluster, in HugeCTR's layout."""
