"""Reads the rows of trained tables as float32, in chunks: of tensors, quantised tables and shards."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hps.errors import InvalidDtypeError, InvalidInputError

Rows = slice | torch.Tensor
"""Rows to read: a range, or (n,) int64 row numbers on the CPU, in any order."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_FUSED_BITS = {"int8": 8, "int4": 4, "int2": 2}
_FUSED_DTYPES = {"fp16": torch.float16, "fp32": torch.float32}


class Table(ABC):
    """A table whose rows this process can read. *Thread-safe* while the weights do not change."""

    shape: tuple[int, int]  # rows and dim
    has_values = True  # False on the meta device

    @abstractmethod
    def read(self, rows: Rows) -> torch.Tensor:
        """Return rows, (n, dim) float32, contiguous, in host memory; it may share memory with the weights.

        Raises:
            IndexError: a row does not exist (RuntimeError from some of torch's operators).
        """


@dataclass(frozen=True)
class Piece:
    """A rectangle of a table in this process. *Immutable.*"""

    row: int
    column: int
    rows: Table


@dataclass(frozen=True)
class ShardedTable:
    """A table that is sharded over several ranks; `ranks.py` makes it readable. *Immutable.*"""

    shape: tuple[int, int]  # rows and dim of the complete table
    pieces: Sequence[Piece]  # of this rank; may be empty, or replicated on other ranks

    @property
    def has_values(self) -> bool:
        return all(piece.rows.has_values for piece in self.pieces)


class WeightTable(Table):
    """A table of a tensor (rows, dim), on any device; float64 is rounded to float32.

    Raises:
        InvalidInputError: the tensor is of a subclass. `InvalidDtypeError`: of a dtype other than float32, float16, bfloat16
            and float64.
    """

    def __init__(self, doing: str, weight: torch.Tensor) -> None:
        if type(weight) not in (torch.Tensor, torch.nn.Parameter):
            raise InvalidInputError(f"{doing}: got weights of type {type(weight).__name__}, expected torch.Tensor; gather them")
        if weight.dtype not in _DTYPES:
            raise InvalidDtypeError(f"{doing}: got weights {weight.dtype}, expected float32, float16, bfloat16 or float64")
        self._weight = weight.detach()
        self.shape = (weight.shape[0], weight.shape[1])
        self.has_values = not weight.is_meta

    def read(self, rows: Rows) -> torch.Tensor:
        block = self._weight[rows] if isinstance(rows, slice) else self._weight.index_select(0, rows.to(self._weight.device))
        return block.to("cpu", torch.float32).contiguous()


class PackedTable(Table):
    """The rows of `torch.ao.nn.quantized.Embedding` and `EmbeddingBag`.

    Raises:
        InvalidDtypeError: rows of neither 8 nor 4 bits.
    """

    def __init__(self, doing: str, embedding: Any) -> None:
        # Rows are read by the module's own operator. `weight()` would copy the table, and its 4-bit rows differ from the
        # module's outputs, since torch rounds their zero points there.
        self._packed = embedding._packed_params._packed_weight
        self.shape = (embedding.num_embeddings, embedding.embedding_dim)
        bits = self._packed.bit_rate()  # the module's `dtype` is wrong after `Embedding.from_float` of 4 bits
        operators = {8: torch.ops.quantized.embedding_byte, 4: torch.ops.quantized.embedding_4bit}
        if bits not in operators:
            raise InvalidDtypeError(f"{doing}: got rows of {bits} bits, expected 8 or 4")
        self._operator: Any = operators[bits]

    def read(self, rows: Rows) -> torch.Tensor:
        answer: torch.Tensor = self._operator(self._packed, _row_numbers(rows))
        return answer


class FusedTable(Table):
    """A table of fbgemm's `IntNBitTableBatchedEmbeddingBagsCodegen`, which torchrec's quantised collections use.

    A row is scale and bias (float16) and values, the first in the lowest bits; or float16 or float32 values alone.

    Raises:
        InvalidInputError: rows were pruned, or are not in memory.
        InvalidDtypeError: rows of another type than integers of 8, 4 or 2 bits, float16 and float32.
    """

    _values: torch.Tensor  # (rows, bytes) uint8, without the padding of fbgemm's rows
    _scale: torch.Tensor  # (rows, 1) float16, as _bias
    _bias: torch.Tensor

    def __init__(self, doing: str, tables: Any, number: int) -> None:
        if not hasattr(tables, "split_embedding_weights_with_scale_bias"):
            raise InvalidInputError(f"{doing}: got a {type(tables).__name__}, expected rows in memory; load them there first")
        if tables.index_remappings_array.numel() or tables.index_remapping_hash_table.numel():
            raise InvalidInputError(f"{doing}: got a pruned table, whose keys are remapped; expected all of its rows")
        _, rows, dim, kind, _ = tables.embedding_specs[number]
        self.shape = (rows, dim)
        if kind.value not in (*_FUSED_BITS, *_FUSED_DTYPES):
            raise InvalidDtypeError(f"{doing}: got rows of {kind.value}, expected {', '.join((*_FUSED_BITS, *_FUSED_DTYPES))}")
        self._kind: str = kind.value
        self._values, self._scale, self._bias = tables.split_embedding_weights_with_scale_bias(split_scale_bias_mode=2)[number]

    def read(self, rows: Rows) -> torch.Tensor:
        chosen = _row_numbers(rows).to(self._values.device)
        values = self._values.index_select(0, chosen)
        if self._kind in _FUSED_DTYPES:
            return values.view(_FUSED_DTYPES[self._kind]).to("cpu", torch.float32)
        bits = _FUSED_BITS[self._kind]
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=values.device)
        unpacked = ((values[:, :, None] >> shifts) & ((1 << bits) - 1)).flatten(1)
        scale, bias = (part.index_select(0, chosen).float() for part in (self._scale, self._bias))
        return torch.addcmul(bias, unpacked.float(), scale).cpu()


def is_sharded(weight: Any) -> bool:
    """Return whether a tensor is a DTensor or a ShardedTensor."""
    return hasattr(weight, "to_local") or hasattr(weight, "local_shards")


def table_of(doing: str, weight: Any) -> Table | ShardedTable:
    """Return the table of a tensor (rows, dim), a DTensor or a ShardedTensor.

    Raises:
        InvalidInputError: a DTensor needs a reduction; and as for `WeightTable`.
    """
    if not is_sharded(weight):
        return WeightTable(doing, weight)
    if not hasattr(weight, "to_local"):  # ShardedTensor
        shards = [(shard.metadata.shard_offsets, shard.tensor) for shard in weight.local_shards()]
    else:
        if any(placement.is_partial() for placement in weight.placements):
            raise InvalidInputError(f"{doing}: got a DTensor with partial sums, expected Shard or Replicate")
        local = weight.to_local()
        tensors = local.local_shards() if hasattr(local, "local_shards") else [local]  # torchrec's LocalShardsWrapper
        chunks = weight.__create_chunk_list__()  # torch.distributed.checkpoint's protocol; one chunk even without a shard
        shards = [(chunk.offsets, tensor) for chunk, tensor in zip(chunks, tensors, strict=False)]
    pieces = [Piece(at[0], at[1], WeightTable(doing, tensor.detach())) for at, tensor in shards if tensor.numel()]
    return ShardedTable((weight.shape[0], weight.shape[1]), pieces)


def _row_numbers(rows: Rows) -> torch.Tensor:
    return torch.from_numpy(np.arange(rows.start, rows.stop)) if isinstance(rows, slice) else rows
