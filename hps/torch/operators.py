"""The operators behind the layers, as seen by torch's compilers, exporters and TorchScript.

    hps::lookup          rows of one table                                                       (*shape of keys, dim)
    hps::lookup_bags     bags of several features, one tensor each                              (B, sum of dims)
    hps::lookup_jagged   bags of several features, concatenated in one tensor                    (B, sum of dims)

An operator's arguments are tensors, strings and numbers only, so that a saved program contains all of them; each feature is
described by a string (`PooledFeature`, `as_text`). An operator is functional: it allocates its output and keeps no reference to
its inputs.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from time import perf_counter_ns
from typing import Any, NamedTuple, NoReturn, TypeAlias
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor

from hps.client.remote_tables import RemoteTables
from hps.engine.session import Session
from hps.errors import (
    InvalidDtypeError,
    InvalidInputError,
    TrainingModeError,
    UnknownVersionError,
    VersionMismatchError,
)
from hps.parameter_server import HPS
from hps.tensors.bags import Bags, Pooling, pooling_of
from hps.tensors.batch import Batch, Part, pooled_batch, refuse_repeated_tables, table_batch
from hps.torch.servers import server_of
from hps.versions.deployment import Deployment, retry_after_takeover

_LIBRARY = torch.library.Library("hps", "DEF")
# Online updates change the vectors of a key, so torch must not evaluate an operator at compile time, even for constant keys:
# this tag prevents it. Torch may still merge two lookups of the same keys within one compiled graph.
_TAGS = (torch.Tag.nondeterministic_seeded,)
_NATIVE_INTEGERS = (torch.int64, torch.int32)  # used by lookups without a conversion
_INTEGERS = (*_NATIVE_INTEGERS, torch.int16, torch.int8, torch.uint8)
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_MOST_POOLINGS = 1 << 12
_TENSORS = "keys", "offsets", "weights"  # of `Bags`
_MODEL = "str ps_config_file, str model_name"
_OPTIONS = "bool wait=True, bool training=False, str version='') -> Tensor"


@dataclass(frozen=True)
class PooledFeature:
    """The bags of one feature: their table and how they are pooled. *Immutable.*"""

    table: int | str
    dim: int
    combiner: str = "sum"
    max_norm: float | None = None
    padding_key: int | None = None


def as_text(features: Sequence[PooledFeature]) -> str:
    """Serialise features as the operators take them."""
    return json.dumps([asdict(feature) for feature in features])


class _Features:
    """The features of a lookup, split into calls that name each table at most once. *Thread-safe.*

    Attributes:
        poolings: cached bags without offsets and weights, by position, number of bags and keys of each.
    """

    def __init__(self, features: Iterable[PooledFeature]) -> None:
        self.poolings: dict[tuple[int, int, int], Pooling] = {}
        self._indices: tuple[ReferenceType[Deployment] | None, list[int]] = None, []
        self.of = tuple(features)
        self.width = sum(feature.dim for feature in self.of)
        self.calls: list[list[int]] = []
        uses: Counter[int | str] = Counter()
        for index, feature in enumerate(self.of):
            if uses[feature.table] == len(self.calls):
                self.calls.append([])
            self.calls[uses[feature.table]].append(index)
            uses[feature.table] += 1
        self.widths = [sum(self.of[index].dim for index in indices_) for indices_ in self.calls]

    def indices(self, deployment: Deployment) -> list[int]:
        """Return the index of each feature's table, and check its width, once for each deployment."""
        deployment_ref, indices = self._indices
        if deployment_ref is None or deployment_ref() is not deployment:
            indices = [deployment.table_index(feature.table) for feature in self.of]
            for feature, index in zip(self.of, indices, strict=True):
                if (spec := deployment.tables[index]).dim != feature.dim:
                    _refuse_width(spec.model_name, feature.table, feature.dim, spec.dim)
            if len(self.calls) == 1:
                refuse_repeated_tables(indices, deployment.tables)  # by name and by id
            self._indices = ref(deployment), indices
        return indices

    def pooling(self, position: int, count: int, hotness: int) -> Pooling:
        """Check the bags of a feature, and add them to `poolings`."""
        feature = self.of[position]
        bags = Bags(None, combiner=feature.combiner, max_norm=feature.max_norm, padding_key=feature.padding_key)  # type: ignore[arg-type]
        pooling = pooling_of(feature.table, bags, count * hotness, (count, hotness), on_cuda=False)
        if len(self.poolings) >= _MOST_POOLINGS:
            self.poolings.clear()
        self.poolings[position, count, hotness] = pooling
        return pooling


@lru_cache(maxsize=4096)
def _features_of(text: str) -> _Features:
    return _Features(PooledFeature(**load) for load in json.loads(text))


def _refuse_training() -> NoReturn:
    raise TrainingModeError(
        "looking up through a layer of hps.torch: got training mode, expected inference: vectors have no gradient; call "
        ".eval() on the layer, or on the whole model, before it is called, compiled or exported"
    )


def _doing(model_name: str, table: Any) -> str:
    """Return the beginning of error messages. `table` None: bags of all features."""
    subject = "bags" if table is None else f"table {table!r}"
    return f"looking up {subject} of model {model_name!r} through a layer"


def _check(
    tensor: Tensor | None, name: str, dtypes: tuple[torch.dtype, ...], keys: Tensor, model_name: str, table: Any
) -> None:
    """Check the dtype of a tensor, and that it is on the device of the keys."""
    if tensor is None or (tensor.dtype in dtypes and tensor.device == keys.device):
        return
    doing = _doing(model_name, table)
    if tensor.dtype not in dtypes:
        raise InvalidDtypeError(f"{doing}: got {name} of {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    raise InvalidInputError(f"{doing}: got {name} on {tensor.device} and keys on {keys.device}, expected them on one device")


def _refuse_width(model_name: str, table: int | str, dim: int, expected: int) -> NoReturn:
    raise InvalidInputError(
        f"{_doing(model_name, table)}: got emb_vec_size {dim}, expected {expected}, the table's width; give the layer that"
    )


def _refuse_unwaited(doing: str, *, keys_on_cuda: bool, wait: bool) -> None:
    """Refuse a lookup over HTTP that would have to run asynchronously on a stream."""
    capturing = keys_on_cuda and torch.cuda.is_current_stream_capturing()
    if capturing or not wait:
        got = "a CUDA graph that is being captured" if capturing else "wait=False"
        raise InvalidInputError(f"{doing}: got {got} with a server over HTTP, which needs wait=True and no capture")


def _deployment(server: HPS, model_name: str, version: str) -> Deployment:
    """Return the serving version, or the one that a layer is bound to."""
    serving = server.live.serving.get(model_name)
    if serving is not None and version in ("", serving.version):
        return serving
    if not version:
        return server.model(model_name)
    try:
        return server.model(model_name, version)
    except UnknownVersionError as error:
        raise VersionMismatchError(
            f"looking up model {model_name!r} through a layer of version {version}: that is no longer in service; "
            f"{serving.version if serving else 'no version'} serves. Make the layer, or convert the module, for that version, "
            f"or deploy version {version} again; a layer made with version='latest' follows the serving version"
        ) from error


def _look_up(session: Session, batch: Batch, *, on_cuda: bool, wait: bool) -> None:
    session.run(batch, wait=wait and not (on_cuda and torch.cuda.is_current_stream_capturing()))


def lookup_rows(
    keys: Tensor,
    ps_config_file: str,
    model_name: str,
    table: int | str,
    emb_vec_size: int,
    wait: bool = True,
    version: str = "",
) -> Tensor:
    """Implement `hps::lookup` without max_norm; also called directly, bypassing the dispatcher."""
    if keys.dtype not in _NATIVE_INTEGERS:
        _check(keys, "keys", _INTEGERS, keys, model_name, table)
        keys = keys.long()
    if not keys.is_contiguous():
        keys = keys.contiguous()
    server = server_of(ps_config_file)
    if isinstance(server, RemoteTables):
        return _remote_rows(server, keys, model_name, version, table, emb_vec_size, wait)
    return _rows(server, keys, model_name, version, table, emb_vec_size, wait)


def _remote_rows(
    server: RemoteTables, keys: Tensor, model_name: str, version: str, table: int | str, emb_vec_size: int, wait: bool
) -> Tensor:
    _refuse_unwaited(_doing(model_name, table), keys_on_cuda=keys.is_cuda, wait=wait)
    shape = *keys.shape, emb_vec_size
    vectors = server.rows(keys.cpu().numpy().reshape(-1), model_name, version, table)
    if vectors is None:
        return torch.full(shape, server.options.fallback or 0.0, dtype=torch.float32, device=keys.device)
    if vectors.shape[1] != emb_vec_size:
        _refuse_width(model_name, table, emb_vec_size, vectors.shape[1])
    return torch.from_numpy(vectors).reshape(shape).to(keys.device)


@retry_after_takeover
def _rows(server: HPS, keys: Tensor, model_name: str, version: str, table: int | str, emb_vec_size: int, wait: bool) -> Tensor:
    start_ns = perf_counter_ns()
    deployment = _deployment(server, model_name, version)
    index = deployment.table_index(table)
    if deployment.tables[index].dim != emb_vec_size:
        _refuse_width(model_name, table, emb_vec_size, deployment.tables[index].dim)
    on_cuda = keys.is_cuda
    session = deployment.session(keys.get_device() if on_cuda else None)
    if wait and not on_cuda:
        flat = keys.numpy().reshape(-1)
        vectors = np.empty((flat.size, emb_vec_size), np.float32)
        session.run(Batch.of(index, flat if keys.dtype is torch.int64 else flat.astype(np.int64), vectors), start_ns)
        return torch.from_numpy(vectors if keys.dim() == 1 else vectors.reshape(*keys.shape, emb_vec_size))
    out = keys.new_empty((*keys.shape, emb_vec_size), dtype=torch.float32)
    if on_cuda and session.on_cuda:  # the cache reads torch's tensors directly, which saves the import by DLPack
        batch = Batch((index,), (keys.numel(),), (keys,), (out,))
        session.run(batch, start_ns, wait=wait and not torch.cuda.is_current_stream_capturing())
        return out
    batch = table_batch(index, emb_vec_size, keys, out, on_cuda=session.on_cuda, with_found=False)
    _look_up(session, batch, on_cuda=on_cuda, wait=wait)
    return out


class RowCall(NamedTuple):
    """A call of `hps::lookup`."""

    keys: Tensor
    ps_config_file: str
    model_name: str
    table_id: int
    table_name: str
    emb_vec_size: int
    max_norm: float | None = None
    wait: bool = True
    training: bool = False
    version: str = ""

    @property
    def device(self) -> torch.device:
        return self.keys.device

    def shape(self) -> tuple[Any, ...]:
        if self.training:
            _refuse_training()
        _check(self.keys, "keys", _INTEGERS, self.keys, self.model_name, self.table_name or self.table_id)
        return *self.keys.shape, self.emb_vec_size

    def look_up(self) -> Tensor:
        shape, table = self.shape(), self.table_name or self.table_id
        if self.max_norm is None:
            return lookup_rows(
                self.keys, self.ps_config_file, self.model_name, table, self.emb_vec_size, self.wait, self.version
            )
        feature = PooledFeature(table, self.emb_vec_size, max_norm=self.max_norm)
        bags = [_bags(feature, self.keys.reshape(-1, 1), None, None)]  # one key each
        return _pooled(self, _Features((feature,)), bags, self.keys.numel()).view(shape)


class BagCall(NamedTuple):
    """A call of `hps::lookup_bags`."""

    keys: Sequence[Tensor]
    offsets: Sequence[Tensor | None]
    weights: Sequence[Tensor | None]
    ps_config_file: str
    model_name: str
    features: str
    include_last_offset: bool
    wait: bool = True
    training: bool = False
    version: str = ""

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    def shape(self) -> tuple[Any, ...]:
        if self.training:
            _refuse_training()
        model, features = self.model_name, _features_of(self.features)
        arguments = self.keys, self.offsets, self.weights
        if {len(argument) for argument in arguments} != {len(features.of)} or not self.keys:
            raise InvalidInputError(
                f"looking up bags of model {model!r}: got {len(self.keys)} keys, {len(self.offsets)} offsets, "
                f"{len(self.weights)} weights, expected {len(features.of)} of each, one for each feature"
            )
        counts = []
        for feature, keys, offsets, weights in zip(features.of, *arguments, strict=True):
            doing = _doing(model, feature.table)
            _check(keys, "keys", _INTEGERS, self.keys[0], model, feature.table)
            _check(offsets, "offsets", _NATIVE_INTEGERS, keys, model, feature.table)
            _check(weights, "weights", _FLOATS, keys, model, feature.table)
            if weights is not None and weights.shape != keys.shape:
                raise InvalidInputError(
                    f"{doing}: got weights of shape {tuple(weights.shape)} for keys of shape {tuple(keys.shape)}, expected "
                    "the same shape"
                )
            counts.append(_count_of(doing, keys, offsets, self.include_last_offset))
            if counts[-1] != counts[0]:
                raise InvalidInputError(
                    f"{doing}: got {counts[-1]} bags, expected {counts[0]}, as many as of the first feature"
                )
        return counts[0], features.width

    def look_up(self) -> Tensor:
        features = _features_of(self.features)
        is_plain = len(features.calls) == 1 and not self.training
        if is_plain and [*self.offsets, *self.weights] == [None] * (2 * len(self.keys)):
            server = server_of(self.ps_config_file)
            if isinstance(server, HPS) and (plain := _uniform_bags(server, self, features)) is not None:
                return plain
        count, _ = self.shape()
        arguments = zip(features.of, self.keys, self.offsets, self.weights, strict=True)
        return _pooled(self, features, [_bags(*bag_arguments, self.include_last_offset) for bag_arguments in arguments], count)


class JaggedCall(NamedTuple):
    """A call of `hps::lookup_jagged`."""

    values: Tensor
    offsets: Tensor
    weights: Tensor | None
    ps_config_file: str
    model_name: str
    features: str
    places: Sequence[int]
    feature_count: int
    borders: Sequence[int] | None = None
    wait: bool = True
    training: bool = False
    version: str = ""

    @property
    def device(self) -> torch.device:
        return self.values.device

    def shape(self) -> tuple[Any, ...]:
        if self.training:
            _refuse_training()
        model, values, weights = self.model_name, self.values, self.weights
        _check(values, "keys", _INTEGERS, values, model, None)
        _check(self.offsets, "offsets", _NATIVE_INTEGERS, values, model, None)
        _check(weights, "weights", _FLOATS, values, model, None)
        if weights is not None and weights.shape != values.shape:
            got = f"{weights.numel()} weights for {values.numel()} keys"
            raise InvalidInputError(f"{_doing(model, None)}: got {got}, expected as many")
        ends = self.offsets.shape[0]
        if ends == 0 or (ends - 1) % self.feature_count:
            raise InvalidInputError(
                f"{_doing(model, None)}: got {ends} offsets for {self.feature_count} features, expected one for each bag, as "
                "many bags of each feature, and one at the end"
            )
        return (ends - 1) // self.feature_count, _features_of(self.features).width

    def look_up(self) -> Tensor:
        count, _ = self.shape()
        values, offsets, weights, doing = self.values, self.offsets, self.weights, _doing(self.model_name, None)
        features, borders, size = _features_of(self.features), self.borders, self.values.shape[0]
        if borders is None:
            if values.is_cuda and torch.cuda.is_current_stream_capturing():
                raise InvalidInputError(
                    f"{doing}: got keys of unknown counts while a CUDA graph is captured, expected their counts on the host; "
                    "call offset_per_key() of the KeyedJaggedTensor before"
                )
            # The only synchronisation with the device: bags are split on the host.
            borders = offsets[::count].tolist() if count else [0] * (self.feature_count + 1)
        if any(after < before for before, after in zip([0, *borders], [*borders, size], strict=True)) or borders[0]:
            raise InvalidInputError(
                f"{doing}: got offsets {list(borders)[:8]} of the features' first bags for {size} keys, expected ascending "
                f"ones from 0 to {size}"
            )
        if count:
            offsets_by_feature = offsets.unfold(0, count + 1, count) - offsets[:-1:count].unsqueeze(1)
        else:
            offsets_by_feature = offsets.expand(self.feature_count, 1)
        bags = []
        for feature, position in zip(features.of, self.places, strict=True):
            part = slice(borders[position], borders[position + 1])
            bags.append(_bags(feature, values[part], offsets_by_feature[position], None if weights is None else weights[part]))
        return _pooled(self, features, bags, count)


_Call: TypeAlias = RowCall | BagCall | JaggedCall


def _count_of(doing: str, keys: Tensor, offsets: Tensor | None, include_last_offset: bool) -> Any:
    if offsets is None:
        if keys.dim() != 2:
            raise InvalidInputError(f"{doing}: got keys of shape {tuple(keys.shape)} without offsets, expected (bags, hotness)")
        return keys.shape[0]
    if keys.dim() != 1 or offsets.dim() != 1:
        raise InvalidInputError(
            f"{doing}: got keys of shape {tuple(keys.shape)} and offsets of shape {tuple(offsets.shape)}, expected one "
            "dimension of both"
        )
    if include_last_offset and offsets.shape[0] == 0:
        raise InvalidInputError(f"{doing}: got no offsets, expected one for each bag and the number of keys at the end")
    return offsets.shape[0] - include_last_offset


def _bags(
    feature: PooledFeature, keys: Tensor, offsets: Tensor | None, weights: Tensor | None, include_last_offset: bool = True
) -> Bags:
    return Bags(
        _as_input(keys if keys.dtype in _NATIVE_INTEGERS else keys.long()),
        None if offsets is None else _as_input(offsets),
        None if weights is None else _as_input(weights.detach().float()),
        combiner=feature.combiner,  # type: ignore[arg-type]
        max_norm=feature.max_norm,
        padding_key=feature.padding_key,
        include_last_offset=include_last_offset,
    )


def _as_input(tensor: Tensor) -> Any:
    """Convert a tensor to the type that lookups take fastest."""
    tensor = tensor.contiguous()
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def _pooled(call: _Call, features: _Features, bags: Sequence[Bags], count: int) -> Tensor:
    """Look up bags of all features in one version: the k-th feature of every table in the k-th call."""
    server = server_of(call.ps_config_file)
    if isinstance(server, RemoteTables):
        parts = _remote_parts(server, call, features, bags, count)
    else:
        parts = _parts(server, call, features, bags, count)
    if len(parts) == 1:
        return parts[0]
    columns: dict[int, Tensor] = {}
    for positions, part in zip(features.calls, parts, strict=True):
        columns.update(zip(positions, part.split([features.of[position].dim for position in positions], 1), strict=True))
    return torch.cat([columns[position] for position in range(len(features.of))], 1)


def _remote_parts(server: RemoteTables, call: _Call, features: _Features, bags: Sequence[Bags], count: int) -> list[Tensor]:
    device = call.device
    _refuse_unwaited(_doing(call.model_name, None), keys_on_cuda=device.type == "cuda", wait=call.wait)
    if device.type != "cpu":
        bags = [
            replace(bag, **{name: getattr(bag, name).cpu().numpy() for name in _TENSORS if getattr(bag, name) is not None})
            for bag in bags
        ]
    calls = [{features.of[position].table: bags[position] for position in positions} for positions in features.calls]
    answers = server.pooled(calls, call.model_name, call.version)
    if answers is None:
        fallback, width = server.options.fallback or 0.0, features.width
        return list(torch.full((count, width), fallback, device=device).split(features.widths, 1))
    for positions, vectors_by_table in zip(features.calls, answers, strict=True):
        for feature, vectors in zip([features.of[position] for position in positions], vectors_by_table, strict=True):
            if vectors.shape[1] != feature.dim:
                _refuse_width(call.model_name, feature.table, feature.dim, vectors.shape[1])
    return [
        torch.from_numpy(vectors_of_call[0] if len(vectors_of_call) == 1 else np.concatenate(vectors_of_call, 1)).to(device)
        for vectors_of_call in answers
    ]


@retry_after_takeover
def _parts(server: HPS, call: _Call, features: _Features, bags: Sequence[Bags], count: int) -> list[Tensor]:
    deployment = _deployment(server, call.model_name, call.version)
    features.indices(deployment)
    device, parts = call.device, []
    on_host = device.type == "cpu"
    for positions, width in zip(features.calls, features.widths, strict=True):
        session = deployment.session(device.index)
        out: Any = np.empty((count, width), np.float32) if on_host else torch.empty((count, width), device=device)
        tables = {features.of[position].table: bags[position] for position in positions}
        batch = pooled_batch(tables, out, deployment.table_index, deployment.tables, on_cuda=session.on_cuda)
        _look_up(session, batch, on_cuda=not on_host, wait=call.wait)
        parts.append(torch.from_numpy(out) if on_host else out)
    return parts


@retry_after_takeover
def _uniform_bags(server: HPS, call: BagCall, features: _Features) -> Tensor | None:
    """Look up bags of equal length without weights on a fast path; None for keys that must be checked or converted."""
    keys = call.keys
    if not keys or len(keys) != len(features.of) or keys[0].dim() != 2:
        return None
    device, count = keys[0].device, keys[0].shape[0]
    on_host, poolings = device.type == "cpu", features.poolings
    deployment = _deployment(server, call.model_name, call.version)
    indices = features.indices(deployment)
    session = deployment.session(device.index)
    if not on_host and not session.on_cuda:
        return None
    shape = count, features.width
    out: Any = np.empty(shape, np.float32) if on_host else torch.empty(shape, dtype=torch.float32, device=device)
    sizes: list[int] = []
    flats: list[Any] = []
    outs: list[Any] = []
    poolings_used: list[Pooling] = []
    column = 0
    for position, (feature, feature_keys) in enumerate(zip(features.of, keys, strict=True)):
        if (
            feature_keys.dtype is not torch.int64
            or feature_keys.dim() != 2
            or feature_keys.device != device
            or not feature_keys.is_contiguous()
        ):
            return None
        bags, hotness = feature_keys.shape
        if bags != count:
            return None
        pooling = poolings.get((position, count, hotness)) or features.pooling(position, count, hotness)
        flat: Any = feature_keys
        if on_host:
            flat = feature_keys.numpy().reshape(-1)
            if not flat.flags.aligned:
                return None
            columns = out[:, column : column + feature.dim]
        else:
            columns = Part(out, column, count * features.width, features.width)
        sizes.append(count * hotness)
        flats.append(flat)
        outs.append(columns)
        poolings_used.append(pooling)
        column += feature.dim
    _look_up(session, Batch(indices, sizes, flats, outs, (), poolings_used), on_cuda=not on_host, wait=call.wait)
    return torch.from_numpy(out) if on_host else out


def define(library: torch.library.Library, schema: str, call: Callable[..., _Call]) -> None:
    """Define an operator that compilers do not look into; `call` is constructed from its arguments."""

    def real(*args: Any, **named: Any) -> Tensor:
        return call(*args, **named).look_up()

    def fake(*args: Any, **named: Any) -> Tensor:
        call_ = call(*args, **named)
        return torch.empty(call_.shape(), dtype=torch.float32, device=call_.device)

    library.define(schema, "CONSERVATIVE", tags=_TAGS)  # else TorchScript evaluates it for constant keys
    name = schema.partition("(")[0]
    library.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)


define(
    _LIBRARY,
    f"lookup(Tensor keys, {_MODEL}, int table_id, str table_name, int emb_vec_size, float? max_norm=None, {_OPTIONS}",
    RowCall,
)
define(
    _LIBRARY,
    f"lookup_bags(Tensor[] keys, Tensor?[] offsets, Tensor?[] weights, {_MODEL}, str features, bool include_last_offset, "
    f"{_OPTIONS}",
    BagCall,
)
define(
    _LIBRARY,
    f"lookup_jagged(Tensor values, Tensor offsets, Tensor? weights, {_MODEL}, str features, int[] places, "
    f"int feature_count, SymInt[]? borders=None, {_OPTIONS}",
    JaggedCall,
)
