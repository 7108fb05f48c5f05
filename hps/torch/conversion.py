"""Converts a trained PyTorch module to one that looks its embeddings up in a parameter server."""

import copy
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hps.client.remote_tables import RemoteTables
from hps.configuration.load import load_configuration
from hps.errors import InvalidInputError, ServedWeightError
from hps.models.manifest import within
from hps.models.sources import ModelSources
from hps.parameter_server import HPS
from hps.torch.embedding_bags import EmbeddingBag, EmbeddingBagCollection
from hps.torch.embeddings import Embedding, EmbeddingForm, embeddings_of, require_convertible, unwrapped
from hps.torch.lookup_layer import LookupLayer, ignore_rows, version_of
from hps.torch.saving import save
from hps.torch.served_weight import Rows, ServedWeight
from hps.torch.servers import Server, location_of, server_of

_log = logging.getLogger(__name__)
_COPIED_ATTRIBUTES = ("padding_idx", "norm_type", "scale_grad_by_freq", "sparse")
_SELECTIONS = (
    functional.embedding,
    functional.embedding_bag,
    torch.index_select,
    torch.Tensor.index_select,
    torch.Tensor.__getitem__,
)


def convert(
    module: nn.Module,
    server: Server,
    model_name: str,
    *,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
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
    `EmbeddingCollection` become ours, with the same attributes. Inputs and outputs keep their shapes and dtypes. Quantised and
    sharded embeddings become the same layers; where weights are sharded, every rank makes the call, each with its own server.
    Three things differ: an absent key gets the table's default vector, where torch raises IndexError; outputs have no gradient;
    the `weight` of a layer supports lookups only (`ServedWeight`).

    The layers look up in the version that is deployed now, since the rest of the module was trained with its rows. When another
    version is deployed, a warning is logged, and they keep using theirs.

    Args:
        module: the trained module, on any devices; without `repository` also on the meta device. Wrappers of torch.compile,
            DataParallel and DistributedDataParallel are removed.
        server: an `HPS`, the path of a `ps.json`, the name of an attached server, or the address of one over HTTP, as for
            `LookupLayer`.
        model_name: the model of the server to look up in.
        example_inputs: positional arguments of the module, or arguments by name. With them the module is run once before
            anything is written, to find other uses of a `weight` than lookups.
        repository: path or URI; the weights are saved as `<repository>/<model_name>/<version>`, with the server's
            `model_source` settings, and deployed. Default: the model is already deployed from what `save` wrote. Not with an
            address.
        version: with `repository`, as for `save`; else the deployed version to look up in, by default the serving one. With
            `latest` the layers follow the serving version, whose rows must fit the rest of the module.
        hotness, settings: with `repository`, as for `save`.
        in_place: replace the embeddings in `module` itself. By default `module` is unchanged, and the result has copies of all
            parameters except the embeddings.
        wait, timeout_s, fallback: as for the layers.

    Returns:
        The converted module in evaluation mode; if `module` is itself an embedding, its layer.

    Raises:
        InvalidInputError: as for `save`; or an embedding without an equivalent layer: a `norm_type` other than 2, a `forward`
            or hooks of its own; or a table that is deployed with another width. `ServedWeightError`: see `example_inputs`.
        UnknownModelError, UnknownVersionError, UnknownTableError: the model or version is not deployed, or has no such table.
        CapacityError: the tables do not fit the server's tiers.
        HPSError: as for `save` and `HPS.deploy`. After any error `module` is unchanged.
    """
    module = unwrapped(module)
    embeddings = embeddings_of(module, with_values=repository is not None)
    for embedding in embeddings:
        require_convertible(embedding)
    _report_copies(module, embeddings)
    if example_inputs is not None:
        _try_on_examples(module, embeddings, example_inputs)
    place = location_of(server, timeout_s, fallback)
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
    tables = [name for embedding in embeddings for name in embedding.tables]
    deployed, dims = _deployed(hps, model_name, version_of(version), tables)
    for embedding in embeddings:
        for name, table in embedding.tables.items():
            if (dim := dims[name]) != table.shape[1]:
                raise InvalidInputError(
                    f"converting {embedding.path}: got vectors of {table.shape[1]} elements, but table {name!r} of model "
                    f"{model_name!r} is deployed with {dim}; deploy what was saved of this module"
                )
    layer_version = version if version == "latest" else deployed
    layers = {embedding.module: _make_layer(embedding, place, model_name, layer_version, wait) for embedding in embeddings}
    if not in_place:
        converted = copy.deepcopy(module, {id(embedding): layer for embedding, layer in layers.items()})
        return converted.eval()
    for path in [path for path, part in module.named_modules(remove_duplicate=False) if part in layers and path]:
        module.set_submodule(path, layers[module.get_submodule(path)])
    return layers.get(module, module).eval()


def _report_copies(module: nn.Module, embeddings: Sequence[Embedding]) -> None:
    """Log parameters that other submodules share with an embedding: those keep a copy of the rows."""
    replaced = {id(part) for embedding in embeddings for part in embedding.module.modules()}
    tables = {id(weight): embedding.path for embedding in embeddings for weight in embedding.module.parameters()}
    for path, part in module.named_modules():
        for name, weight in part.named_parameters(path, recurse=False):
            if id(part) not in replaced and id(weight) in tables:
                _log.warning("converting %s: %s shares its weight and keeps a copy, without updates", tables[id(weight)], name)


def _try_on_examples(
    module: nn.Module, embeddings: Sequence[Embedding], example_inputs: Sequence[Any] | Mapping[str, Any]
) -> None:
    """Run a copy whose embeddings can only be looked up, as those of the converted module."""
    memo: dict[int, Any] = {id(weight): weight for weight in module.parameters()}
    served_weights = {id(weight) for embedding in embeddings for weight in embedding.module.parameters()}
    for embedding in embeddings:
        memo[id(embedding.module)] = embedding.module
        weight: Any = embedding.module.weight if isinstance(embedding.module, nn.Embedding | nn.EmbeddingBag) else None
        if type(weight) is nn.Parameter:
            stand_in, looked_up = copy.copy(embedding.module), copy.copy(embedding.module)
            vars(looked_up)["max_norm"] = None  # torch would scale the rows in place
            rows = weight.detach()
            named = ServedWeight(repr(embedding.path), rows.shape, rows[:0], _lookup_in(rows))
            vars(stand_in).update(forward=looked_up.forward, weight=named)
            memo[id(embedding.module)] = stand_in
    tried = copy.deepcopy(module, memo)
    # `eval()` would also reach collections, which are not copied: the caller's module must keep its mode.
    for part in {*tried.modules()} - {*module.modules()}:
        part.training = False
    by_name = example_inputs if isinstance(example_inputs, Mapping) else {}
    selections = _Selections(
        {id(weight): name for name, weight in module.named_parameters() if id(weight) not in served_weights}
    )
    try:
        with torch.no_grad(), selections:
            tried(*(() if by_name else example_inputs), **by_name)
    except ServedWeightError:
        raise
    except Exception as error:
        raise InvalidInputError(
            f"converting a {type(module).__name__}: it does not run on the examples: {type(error).__name__}: {error}"
        ) from error
    for name in selections.parameters:
        _log.warning("converting: parameter %s is looked up, but is no nn.Embedding's weight, and stays in the module", name)


def _lookup_in(rows: torch.Tensor) -> Rows:
    return lambda keys, _: functional.embedding(keys, rows)


class _Selections(TorchFunctionMode):
    """Collects the parameters whose rows are selected by keys. `names` is by id."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self.parameters: dict[str, None] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _SELECTIONS and any(isinstance(arg, torch.Tensor) and not arg.is_floating_point() for arg in args):
            self.parameters |= {self._names[id(arg)]: None for arg in args if id(arg) in self._names and arg.ndim == 2}
        return function(*args, **(kwargs or {}))


def _deployed(
    server: HPS | RemoteTables, model_name: str, version: str, tables: Sequence[str]
) -> tuple[str, Mapping[str, int]]:
    """Return a deployed version, by default the serving one, and the widths of its tables."""
    if isinstance(server, RemoteTables):
        return server.deployed(model_name, version, tables)
    deployment = server.model(model_name, version or None)
    return deployment.version, {name: deployment.tables[deployment.table_index(name)].dim for name in tables}


class ServedEmbedding(LookupLayer):
    """Replaces `nn.Embedding`, whose argument is called `input`. *Thread-safe.*"""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return self.look_up(input)


class ServedBagCollection(EmbeddingBagCollection):
    """Replaces torchrec's `EmbeddingBagCollection`, with its methods. *Thread-safe.*"""

    configs: Sequence[Any]

    def embedding_bag_configs(self) -> Sequence[Any]:
        return self.configs

    def is_weighted(self) -> bool:  # type: ignore[override]
        return self._is_weighted


class EmbeddingCollection(nn.Module):
    """Replaces torchrec's `EmbeddingCollection`, with its methods; one lookup per feature. *Thread-safe.*

    Args:
        features: name, feature and layer number of each output.
        configs: torchrec's.
        need_indices: return the keys as weights of the outputs, as torchrec does.
    """

    def __init__(
        self, layers: list[LookupLayer], features: list[tuple[str, str, int]], configs: Sequence[Any], need_indices: bool
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._features = features
        self._configs = configs
        self._need_indices = need_indices
        self.training = False
        self.register_load_state_dict_pre_hook(ignore_rows)  # type: ignore[no-untyped-call]

    def embedding_configs(self) -> Sequence[Any]:
        return self._configs

    def embedding_dim(self) -> int:
        dim: int = self._configs[0].embedding_dim
        return dim

    def need_indices(self) -> bool:
        return self._need_indices

    @property
    def device(self) -> torch.device:
        first: Any = self.layers[0]
        return first.device  # type: ignore[no-any-return]

    def forward(self, features: Any) -> dict[str, Any]:
        """Look up a `KeyedJaggedTensor`; returns a `JaggedTensor` of rows for each feature."""
        tables = features.to_dict()
        answer = {}
        for name, feature, number in self._features:
            keys = tables[feature]
            answer[name] = type(keys)(
                values=self.layers[number](keys.values()),
                lengths=keys.lengths(),
                weights=keys.values() if self._need_indices else None,
            )
        return answer


def _make_layer(embedding: Embedding, server: str, model_name: str, version: str, wait: bool) -> nn.Module:
    weight = next(
        (parameter for parameter in (*embedding.module.parameters(), *embedding.module.buffers()) if not parameter.is_meta),
        torch.empty(0),
    )
    like = torch.empty(0, dtype=embedding.dtype, device=weight.device)
    if embedding.form is EmbeddingForm.BAG_COLLECTION:
        bags = ServedBagCollection(
            server, model_name, embedding.lookups, version=version, is_weighted=embedding.is_weighted, wait=wait
        )
        bags.stand_for(like, configs=embedding.configs)
        return bags
    attributes = {name: value for name, value in vars(embedding.module).items() if name in _COPIED_ATTRIBUTES}
    layers: list[Any] = []
    for lookup in embedding.lookups:
        table = (server, model_name, lookup.name, lookup.emb_vec_size)
        common: dict[str, Any] = {"version": version, "max_norm": lookup.max_norm, "wait": wait}
        if embedding.form is EmbeddingForm.BAGS:
            common |= {"padding_idx": lookup.padding_idx, "include_last_offset": embedding.include_last_offset}
            layers.append(EmbeddingBag(*table, mode=lookup.pooling, **common))
        else:
            layers.append(ServedEmbedding(*table, **common))
        layers[-1].stand_for(like, num_embeddings=embedding.tables[lookup.name].shape[0], **attributes)
    if embedding.form is not EmbeddingForm.COLLECTION:
        layer: nn.Module = layers[0]
        return layer
    features = [
        (name, feature, number)
        for number, (lookup, output_names) in enumerate(zip(embedding.lookups, embedding.outputs, strict=True))
        for name, feature in zip(output_names, lookup.features, strict=True)
    ]
    return EmbeddingCollection(layers, features, embedding.configs, embedding.need_indices)
