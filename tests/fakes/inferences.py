"""Inference requests as a front decodes them, with memory of their own for the answer."""

import numpy as np

from hps.service.protocol.open_inference import Inference, lay_out_body
from hps.service.protocol.request_checks import ModelTables


def decode_request(body: bytes | bytearray, header_length: int | None, model: ModelTables, max_keys: int) -> Inference:
    laid = lay_out_body(body, header_length, model, max_keys)
    return laid.inference(np.empty(laid.layout.size, np.uint8))
