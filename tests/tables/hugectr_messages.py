"""Messages of HugeCTR's trainers."""

import numpy as np

from hps.types import FloatArray, KeyArray


def encode_hugectr(keys: KeyArray, vectors: FloatArray, key_bytes: int = 8) -> bytes:
    """Encode a message as HugeCTR's `KafkaMessageSink` does; `hps/updates/framing.py` has the layout."""
    row = np.dtype([("key", "<u4" if key_bytes == 4 else "<i8"), ("vector", "<f4", vectors.shape[1:])])
    rows = np.empty(keys.size, row)
    rows["key"], rows["vector"] = keys, vectors
    return b"".join([b"HCTR", (4 * vectors.shape[1]).to_bytes(4, "little"), rows.tobytes()])
