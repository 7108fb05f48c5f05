"""HugeCTR's PyTorch plugin, by name: `import hps_torch` in code that was written for it works unchanged."""

import torch
from torch import Tensor

from hps.torch import LookupLayer as LookupLayer
from hps.torch import operators

__all__ = ["LookupLayer"]


def _call(keys: Tensor, ps_config_file: str, model_name: str, table_id: int, emb_vec_size: int) -> operators.RowCall:
    return operators.RowCall(keys, ps_config_file, model_name, table_id, "", emb_vec_size)


_LIBRARY = torch.library.Library("hps_torch", "DEF")
operators.define(
    _LIBRARY,
    "hps_embedding_lookup(Tensor keys, str ps_config_file, str model_name, int table_id, int emb_vec_size) -> Tensor",
    _call,
)
