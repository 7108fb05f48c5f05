"""Layers that return one vector per bag of keys, like `torch.nn.EmbeddingBag` and torchrec's `EmbeddingBagCollection`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hps.errors import InvalidInputError
from hps.tensors.bags import COMBINERS
from hps.torch.lookup_layer import ServedModule, TableModule, called_directly, version_text
from hps.torch.operators import BagCall, JaggedCall, PooledFeature, as_text
from hps.torch.servers import Server


class EmbeddingBag(TableModule):
    """Looks up bags of keys of one table and pools each. *Thread-safe*; it has no parameters.

    Vectors are float32, also under autocast, without gradient; weights are detached.

    Args:
        ps_config_file, model_name, table_id, emb_vec_size, version, wait, timeout_s, fallback: as for `LookupLayer`.
        mode: sum, mean, sqrtn or max.
        max_norm: vectors with a larger L2 norm are scaled down to it before pooling. Default: no limit.
        padding_idx: a key that is ignored.
        include_last_offset: offsets end with the number of keys.
    """

    def __init__(
        self,
        ps_config_file: Server,
        model_name: str,
        table_id: int | str,
        emb_vec_size: int,
        *,
        version: str | int | None = None,
        mode: str = "mean",
        max_norm: float | None = None,
        padding_idx: int | None = None,
        include_last_offset: bool = False,
        wait: bool = True,
        timeout_s: float | None = None,
        fallback: float | None = None,
    ) -> None:
        super().__init__(ps_config_file, model_name, version, wait, timeout_s, fallback)
        self.set_table(table_id, emb_vec_size, max_norm, padding_idx)
        self.mode = check_combiner(mode)
        self.include_last_offset: bool = include_last_offset
        self.features: str = as_text([PooledFeature(self.table, emb_vec_size, mode, max_norm, padding_idx)])

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:  # noqa: A002
        """Look up bags.

        Args:
            input: keys, integers: (B, hotness), or (n,) with offsets.
            offsets: (B,) int64 or int32, or (B + 1,) with `include_last_offset`: the start of each bag.
            per_sample_weights: floats, as `input`, rounded to float32; with any mode but max.

        Returns:
            (B, emb_vec_size) float32, on the device of the keys; zeros for an empty bag.

        Raises:
            TrainingModeError: the layer is in training mode.
            HPSError: as `HPS.lookup_pooled`, or with an address as `Client.lookup_pooled`.
        """
        weights = None if per_sample_weights is None else per_sample_weights.detach()
        arguments = (
            [input],
            [offsets],
            [weights],
            self.ps_config_file,
            self.model_name,
            self.features,
            self.include_last_offset,
            self.wait,
            self.training,
            self.version,
        )
        if not torch.jit.is_scripting():  # noqa: SIM102 - TorchScript skips the body only if this is the whole condition
            if called_directly(input):
                return self.rounded(BagCall(*arguments).look_up())
        out: Tensor = torch.ops.hps.lookup_bags(*arguments)
        return self.rounded(out)

    def extra_repr(self) -> str:
        return (
            f"{self.ps_config_file!r}, {self.model_name!r}, {self.table!r}, {self.emb_vec_size}, "
            f"{version_text(self.version)}mode={self.mode!r}, "
            f"max_norm={self.max_norm}, padding_idx={self.padding_idx}, include_last_offset={self.include_last_offset}"
        )


@dataclass(frozen=True)
class BagTable:
    """A table of an `EmbeddingBagCollection`. *Immutable.*"""

    name: str  # in the model
    features: Sequence[str]  # looked up in this table; a feature may use several tables
    emb_vec_size: int
    pooling: str = "sum"  # or mean, sqrtn, max
    max_norm: float | None = None  # as for `EmbeddingBag`
    padding_idx: int | None = None  # likewise


class EmbeddingBagCollection(ServedModule):
    """Looks up bags of many features at once, like torchrec's `EmbeddingBagCollection`. *Thread-safe.*

    One kernel looks up and pools all features; features that share a table need one launch each. It has no parameters.

    Args:
        ps_config_file, model_name, version, wait, timeout_s, fallback: as for `LookupLayer`.
        tables: each names a feature at most once.
        is_weighted: whether keys have weights.
    """

    def __init__(
        self,
        ps_config_file: Server,
        model_name: str,
        tables: Sequence[BagTable],
        *,
        version: str | int | None = None,
        is_weighted: bool = False,
        wait: bool = True,
        timeout_s: float | None = None,
        fallback: float | None = None,
    ) -> None:
        super().__init__(ps_config_file, model_name, version, wait, timeout_s, fallback)
        if not tables:
            raise InvalidInputError(f"making a collection for model {model_name!r}: got no tables, expected at least one")
        self.tables = tuple(tables)
        self._is_weighted = is_weighted
        self.feature_names = [feature for table in tables for feature in table.features]
        named = output_names([(table.name, table.features) for table in tables])
        self.output_names = [name for names in named for name in names]
        if repeated := {name for name in self.output_names if self.output_names.count(name) > 1}:
            raise InvalidInputError(
                f"making a collection for model {model_name!r}: got {min(repeated)!r} as the name of several outputs, expected "
                "that they differ; name a feature once a table, and make another collection for another pooling of it"
            )
        self.dims = [table.emb_vec_size for table in tables for _ in table.features]
        self.features = as_text(
            [
                PooledFeature(table.name, table.emb_vec_size, check_combiner(table.pooling), table.max_norm, table.padding_idx)
                for table in tables
                for _ in table.features
            ]
        )

    @property
    def is_weighted(self) -> bool:
        return self._is_weighted

    def forward(self, features: Any) -> Any:
        """Look up the bags of all features.

        Args:
            features: a torchrec `KeyedJaggedTensor`; or, by feature, keys (B, hotness), or (keys (n,), offsets (B + 1,)), or
                (keys, offsets, weights), where offsets may be None.

        Returns:
            A torchrec `KeyedTensor` of (B, sum of dims), or {feature: (B, dim)}, views of one such tensor; float32, where the
            keys are. A feature of several tables has a name for each: `feature@table`.

        Raises:
            TrainingModeError: the layer is in training mode.
            InvalidInputError: a feature is missing, or features have different numbers of bags.
            HPSError: as `HPS.lookup_pooled`, or with an address as `Client.lookup_pooled`.
        """
        if isinstance(features, Mapping):
            return dict(zip(self.output_names, self._separate(features).split(self.dims, 1), strict=True))
        return self._jagged(features)

    def _separate(self, features: Mapping[str, Any]) -> Tensor:
        keys: list[Tensor] = []
        offsets: list[Tensor | None] = []
        weights: list[Tensor | None] = []
        for name in self.feature_names:
            if name not in features:
                self._refuse_missing(name, features)
            bags = features[name]
            feature_keys, feature_offsets, feature_weights = (
                (*bags, None, None)[:3] if isinstance(bags, (tuple, list)) else (bags, None, None)
            )
            if (feature_weights is not None) != self._is_weighted:
                raise InvalidInputError(
                    f"looking up bags of feature {name!r}: got {'weights' if not self._is_weighted else 'no weights'}, but the "
                    f"collection has is_weighted={self._is_weighted}"
                )
            keys.append(feature_keys)
            offsets.append(feature_offsets)
            weights.append(None if feature_weights is None else feature_weights.detach())
        call = BagCall(
            keys,
            offsets,
            weights,
            self.ps_config_file,
            self.model_name,
            self.features,
            include_last_offset=True,
            wait=self.wait,
            training=self.training,
            version=self.version,
        )
        out: Tensor = call.look_up() if called_directly(keys[0]) else torch.ops.hps.lookup_bags(*call)
        return out

    def _jagged(self, features: Any) -> Any:
        from torchrec.sparse.jagged_tensor import KeyedTensor

        if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
            raise InvalidInputError(
                "looking up a KeyedJaggedTensor: got different numbers of bags by feature (variable stride), or inverse "
                "indices, expected the same number for each, in their order"
            )
        given: list[str] = features.keys()
        for name in self.feature_names:
            if name not in given:
                self._refuse_missing(name, given)
        values = features.values()
        weights = features.weights_or_none() if self._is_weighted else None
        if self._is_weighted and weights is None:
            raise InvalidInputError("looking up a KeyedJaggedTensor: got no weights, but the collection has is_weighted=True")
        call = JaggedCall(
            values,
            features.offsets(),
            None if weights is None else weights.detach(),
            self.ps_config_file,
            self.model_name,
            self.features,
            [given.index(name) for name in self.feature_names],
            len(given),
            features.offset_per_key_or_none(),
            self.wait,
            self.training,
            self.version,
        )
        out: Tensor = call.look_up() if called_directly(values) else torch.ops.hps.lookup_jagged(*call)
        return KeyedTensor(self.output_names, self.dims, self.rounded(out))

    def _refuse_missing(self, name: str, features: Any) -> None:
        raise InvalidInputError(
            f"looking up bags of model {self.model_name!r}: got features {list(features)[:8]}, expected also {name!r}"
        )

    def extra_repr(self) -> str:
        server = f"{self.ps_config_file!r}, {self.model_name!r}, {version_text(self.version)}"
        lines = [f"{server}is_weighted={self._is_weighted}", *map(repr, self.tables)]
        return "\n".join(lines)


def output_names(tables: Sequence[tuple[str, Sequence[str]]]) -> list[list[str]]:
    """Return the output names of tables, given as name and features: `feature@table` for a feature of several tables."""
    counts = Counter(feature for _, features in tables for feature in features)
    return [[f"{feature}@{name}" if counts[feature] > 1 else feature for feature in features] for name, features in tables]


def check_combiner(mode: str) -> str:
    if mode not in COMBINERS:
        raise InvalidInputError(f"making a layer of bags: got mode {mode!r}, expected one of {list(COMBINERS)}")
    return mode
