"""Storage of model files: the contract (`base.py`), local disks, HDFS, S3 and GCS."""
