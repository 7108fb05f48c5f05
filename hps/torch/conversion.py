"""Converts a trained PyTorch module to one that looks its embeddings up in a parameter server."""

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hps.configuration.load import load_configuration
from hps.errors import InvalidInputError
from hps.models.manifest import within
from hps.models.sources import ModelSources
from hps.parameter_server import HPS
from hps.torch.embedding_bags import EmbeddingBag, EmbeddingBagCollection
from hps.torch.embeddings import Embedding, EmbeddingForm, embeddings_of, refuse_unequal, unwrapped
from hps.torch.lookup_layer import LookupLayer, version_of
from hps.torch.remote import RemoteTables
from hps.torch.saving import save
from hps.torch.servers import Server, place_of, server_of


def convert(
    module: nn.Module,
    server: Server,
    model_name: str,
    *,
    repository: str | os.PathLike[str] | None = None,
    version: str | int | None = None,
    in_place: bool = False,
    hotness: int | Mapping[str, int] | None = None,
    settings: Mapping[str, Any] | None = None,
    wait: bool = True,
    timeout_s: float | None = None,
    fallback: float | None = None,
) -> nn.Module:
    """Replace the embeddings of a trained module with layers that look the same rows up in a parameter server.

    `nn.Embedding` becomes `LookupLayer`, `nn.EmbeddingBag` becomes `EmbeddingBag`, and torchrec's `EmbeddingBagCollection` and
    `EmbeddingCollection` become ours, with the same mode, `max_norm`, `padding_idx`, `include_last_offset` and weights. Inputs
    and outputs keep their shapes and dtypes. Quantised and sharded embeddings become the same layers; where weights are
    sharded, every rank makes the call, each with its own server. Three things differ: an absent key gets the table's default
    vector, where torch raises IndexError; outputs have no gradient; layers have no `weight`.

    The layers are of the version that is deployed now, whose rows the rest of the module was trained with. If another one is
    deployed, a warning is logged, and they go on with theirs.

    Args:
        module: the trained module, on any devices; without `repository` also on the meta device.
        server: an `HPS`, the path of a `ps.json`, the name of an attached server, or the address of one over HTTP, as for
            `LookupLayer`.
        model_name: the model of the server to look up in.
        repository: path or URI; the weights are saved as `<repository>/<model_name>/<version>`, with the server's
            `model_source` settings, and deployed. Default: the model is already deployed from what `save` wrote. Not with an
            address.
        version: with `repository`, as for `save`; else the deployed version that the layers are of, by default the serving one,
            or `latest`: the layers follow the serving version, whose rows the rest of the module must fit.
        hotness, settings: with `repository`, as for `save`.
        in_place: replace the embeddings in `module` itself. By default `module` is unchanged, and the result has copies of all
            parameters except the embeddings.
        wait, timeout_s, fallback: as for the layers.

    Returns:
        The converted module in evaluation mode; if `module` is itself an embedding, its layer.

    Raises:
        InvalidInputError: as for `save`; or an embedding without an equivalent layer: mode `max`, a `norm_type` other than 2, a
            `forward` or hooks of its own; or a table that is deployed with another width.
        UnknownModelError, UnknownVersionError, UnknownTableError: the model or version is not deployed, or has no such table.
        CapacityError: the tables do not fit the server's tiers.
        HPSError: as for `save` and `HPS.deploy`. After any error `module` is unchanged.
    """
    module = unwrapped(module)
    found = embeddings_of(module, with_values=repository is not None)
    for one in found:
        refuse_unequal(one)
    place = place_of(server, timeout_s, fallback)
    hps = server_of(place)
    if repository is not None:
        if isinstance(hps, RemoteTables):
            raise InvalidInputError(
                f"converting to model {model_name!r}: got a repository with a server over HTTP, expected one in this process; "
                "write the version with hps.torch.save, deploy it there with `hps deploy`, and convert without repository"
            )
        sources = ModelSources(hps.config.model_source)
        uri, number = within(os.fspath(repository), model_name), None if version is None else str(version)
        saved = save(module, uri, version=number, hotness=hotness, settings=settings, sources=sources)
        hps.deploy(load_configuration({"models": [saved.entry]}).models[0], saved.version, pin=False)
        version = saved.version
    elif hotness is not None or settings is not None:
        raise InvalidInputError(f"converting to model {model_name!r}: got hotness or settings, but no repository")
    tables = [name for one in found for name in one.tables]
    deployed, dims = _deployed(hps, model_name, version_of(version), tables)
    for one in found:
        for name, table in one.tables.items():
            if (dim := dims[name]) != table.shape[1]:
                raise InvalidInputError(
                    f"converting {one.path}: got vectors of {table.shape[1]} elements, but table {name!r} of model "
                    f"{model_name!r} is deployed with {dim}; deploy what was saved of this module"
                )
    own = version if version == "latest" else deployed
    layers = {one.module: _layer(one, place, model_name, own, wait) for one in found}
    if not in_place:
        converted = copy.deepcopy(module, {id(embedding): layer for embedding, layer in layers.items()})
        return converted.eval()
    for path in [path for path, part in module.named_modules(remove_duplicate=False) if part in layers and path]:
        module.set_submodule(path, layers[module.get_submodule(path)])
    return layers.get(module, module).eval()


def _deployed(
    server: HPS | RemoteTables, model_name: str, version: str, tables: Sequence[str]
) -> tuple[str, Mapping[str, int]]:
    """Return a deployed version, and the widths of its tables. `version` empty: the serving one."""
    if isinstance(server, RemoteTables):
        return server.deployed(model_name, version, tables)
    found = server.model(model_name, version or None)
    return found.version, {name: found.tables[found.table_index(name)].dim for name in tables}


class EmbeddingCollection(nn.Module):
    """Replaces torchrec's `EmbeddingCollection`; one lookup per feature. *Thread-safe.*

    Args:
        features: name, feature and layer number of each output.
        need_indices: return the keys as weights of the outputs, as torchrec does.
    """

    def __init__(self, layers: list[LookupLayer], features: list[tuple[str, str, int]], need_indices: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._features = features
        self._need_indices = need_indices
        self.training = False

    def forward(self, features: Any) -> dict[str, Any]:
        """Look up a `KeyedJaggedTensor`; returns a `JaggedTensor` of rows for each feature."""
        given = features.to_dict()
        answer = {}
        for name, feature, number in self._features:
            keys = given[feature]
            answer[name] = type(keys)(
                values=self.layers[number](keys.values()),
                lengths=keys.lengths(),
                weights=keys.values() if self._need_indices else None,
            )
        return answer


class _Rounded(nn.Module):
    """Casts outputs and per-sample weights of a layer to the dtype of the weights that it replaces."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        self.dtype = dtype

    def forward(self, *args: Any, **named: Any) -> torch.Tensor:
        answer: torch.Tensor = self.layer(*map(_widened, args), **{name: _widened(given) for name, given in named.items()})
        return answer.to(self.dtype)


def _widened(given: Any) -> Any:
    return given.float() if isinstance(given, torch.Tensor) and given.is_floating_point() else given


def _layer(one: Embedding, server: str, model_name: str, version: str, wait: bool) -> nn.Module:
    if one.form is EmbeddingForm.BAG_COLLECTION:
        return EmbeddingBagCollection(server, model_name, one.lookups, version=version, is_weighted=one.is_weighted, wait=wait)
    if one.form is EmbeddingForm.COLLECTION:
        layers = [
            LookupLayer(server, model_name, each.name, each.emb_vec_size, version=version, max_norm=each.max_norm, wait=wait)
            for each in one.lookups
        ]
        features = [
            (name, feature, number)
            for number, (each, given) in enumerate(zip(one.lookups, one.outputs, strict=True))
            for name, feature in zip(given, each.features, strict=True)
        ]
        return EmbeddingCollection(layers, features, one.need_indices)
    (lookup,) = one.lookups
    place = (server, model_name, lookup.name, lookup.emb_vec_size)
    layer: nn.Module
    if one.form is EmbeddingForm.ROWS:
        layer = LookupLayer(*place, version=version, max_norm=lookup.max_norm, wait=wait)
    else:
        layer = EmbeddingBag(
            *place,
            version=version,
            mode=lookup.pooling,
            max_norm=lookup.max_norm,
            padding_idx=lookup.padding_idx,
            include_last_offset=one.include_last_offset,
            wait=wait,
        )
    return layer if one.dtype == torch.float32 else _Rounded(layer, one.dtype)
