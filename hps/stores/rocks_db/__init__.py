"""RocksDB in HugeCTR's layout, through rocksdict."""
