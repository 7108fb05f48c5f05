"""Embedding layers for PyTorch that look vectors up in a parameter server.

    import hps.torch

    bag = hps.torch.EmbeddingBag("ps.json", "ranking", "item", 128, mode="sum")
    pooled = bag(keys, offsets)  # (B, 128) float32, on the device of the keys

Importing it imports torch; `import hps` does not. See docs/torch.md.
"""

from hps.ground.registry import install_hint

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(f"hps.torch needs torch: {install_hint('torch')}", name="torch") from error

from hps.torch.conversion import convert as convert
from hps.torch.embedding_bags import BagTable as BagTable
from hps.torch.embedding_bags import EmbeddingBag as EmbeddingBag
from hps.torch.embedding_bags import EmbeddingBagCollection as EmbeddingBagCollection
from hps.torch.explaining import Explanation as Explanation
from hps.torch.explaining import explain as explain
from hps.torch.lookup_layer import LookupLayer as LookupLayer
from hps.torch.packaging import PackagedModel as PackagedModel
from hps.torch.packaging import package as package
from hps.torch.saving import SavedModel as SavedModel
from hps.torch.saving import save as save
from hps.torch.servers import attach as attach
from hps.torch.servers import close as close

__all__ = [
    "BagTable",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "Explanation",
    "LookupLayer",
    "PackagedModel",
    "SavedModel",
    "attach",
    "close",
    "convert",
    "explain",
    "package",
    "save",
]
