"""Rows of 8-bit codes with a scale and an offset, as other systems store them: element = code * scale + offset.

    fused8bit   dim x uint8, float32 scale, float32 offset    FBGEMM: `Fused8BitRowwiseQuantized` (`fbgemm/QuantUtils.h`)
    tbe8        float16 scale, float16 offset, dim x uint8,   FBGEMM's inference tables, and so the state of torchrec's
                then perhaps zeros up to 16 bytes             quantised collections: `rounded_row_size_in_bytes`
    rowwise8    dim x uint8, float16 scale, float16 offset    NVE: `QUint8RowwiseF16`; TorchEasyRec: `quant_util.py`
    quint8      as fused8bit; listed with its dim             PyTorch: `torch.ao.nn.quantized.EmbeddingBag`

An element is rounded once (fma), as by FBGEMM's kernels for AVX2. Of fused8bit they round the last dim % 8 elements as float64
first, which differs where a sum is next to the middle between two float32, in one of about 2^29. Where the scale is a float16,
the product is exact, and any order of operations gives the same.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import float32, int64, njit, types, uint8

from hps.errors import ModelFileError
from hps.ground.kernels.numba_atomics import intrinsic
from hps.ground.kernels.numba_kernels import kernel, read_only
from hps.ground.rows import half_to_float
from hps.models.formats.base import AnyArray
from hps.types import FloatArray

QUINT8 = "quint8"
_ALIGNMENT = 16  # of FBGEMM's tables on a GPU, which torchrec uses everywhere


@dataclass(frozen=True, slots=True)
class QuantisedLayout:
    """Where a row has its parts. *Immutable.*

    Attributes:
        scale_bytes: size of the scale and of the offset, which follows it.
        leads: whether they precede the codes.
        padded: whether bytes may follow the row.
    """

    scale_bytes: int
    leads: bool = False
    padded: bool = False


LAYOUTS = {
    "fused8bit": QuantisedLayout(4),
    "tbe8": QuantisedLayout(2, leads=True, padded=True),
    "rowwise8": QuantisedLayout(2),
    QUINT8: QuantisedLayout(4),
}
CLAIMED_LAYOUTS = ("fused8bit", "tbe8", "rowwise8")
"""Layouts that uint8 arrays may have."""


def row_dim(path: str, name: str, row_bytes: int, layout: str, dim: int | None) -> int:
    """Return the elements of a row.

    Args:
        row_bytes: size of a row of the array `name`.
        dim: expected number of elements; needed for rows that may have padding.

    Raises:
        ModelFileError: rows have another size, or it fits several dims.
    """
    form = LAYOUTS[layout]
    beside = 2 * form.scale_bytes
    if dim is None:
        if row_bytes <= beside:
            raise ModelFileError(
                f"importing {path}: got rows of {row_bytes} bytes in {name!r}, expected more than the {beside} of scale and "
                f"offset of {layout}"
            )
        if form.padded and row_bytes % _ALIGNMENT == 0:
            raise ModelFileError(
                f"importing {path}: got rows of {row_bytes} bytes in {name!r}, which fit vectors of "
                f"{max(1, row_bytes - beside - _ALIGNMENT + 1)} to {row_bytes - beside} elements, since {layout} pads rows to "
                f"{_ALIGNMENT} bytes; say --dim"
            )
        return row_bytes - beside
    sizes = [dim + beside]
    if form.padded and (dim + beside) % _ALIGNMENT:
        sizes.append((dim + beside + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT)
    if row_bytes not in sizes:
        raise ModelFileError(
            f"importing {path}: got rows of {row_bytes} bytes in {name!r}, expected {' or '.join(map(str, sizes))} for "
            f"{dim} elements of {layout}; is it another layout ({', '.join(CLAIMED_LAYOUTS)}), or another dim?"
        )
    return dim


def dequantised(path: str, name: str, block: AnyArray, row: int, layout: str, dim: int) -> FloatArray:
    """Convert rows to vectors, (n, dim) float32.

    Args:
        block: (n, row bytes) uint8.
        row: number of the block's first row in the source.

    Raises:
        ModelFileError: a row has no finite scale of at least 0 and finite offset: bytes of another layout seldom have.
    """
    form = LAYOUTS[layout]
    rows = np.ascontiguousarray(block)
    vectors: FloatArray = np.empty((len(rows), dim), np.float32)
    at = 0 if form.leads else dim
    codes_at = 2 * form.scale_bytes if form.leads else 0
    done = _dequantise(rows, vectors, codes_at, at, form.scale_bytes)
    if done < len(rows):
        kind = np.dtype(f"<f{form.scale_bytes}")
        scale, offset = np.frombuffer(rows[done].tobytes(), kind, 2, at)
        raise ModelFileError(
            f"importing {path}: row {row + done} of {name!r} has scale {scale} and offset {offset}, expected finite ones and a "
            f"scale of at least 0; is it another layout than {layout}?"
        )
    return vectors


@intrinsic
def _fma(typing_context: Any, factor: Any, other: Any, term: Any) -> Any:
    """Multiply and add with one rounding."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), emit


@njit(inline="always")
def _number(row: AnyArray, at: int, size: int) -> float:
    """Read a little-endian float of 2 or 4 bytes at any address."""
    bits: Any = np.uint32(row[at]) | np.uint32(row[at + 1]) << np.uint32(8)
    if size == 2:
        return float(half_to_float(bits))
    bits |= np.uint32(row[at + 2]) << np.uint32(16) | np.uint32(row[at + 3]) << np.uint32(24)
    return float(np.uint32(bits).view(np.float32))


@kernel(int64, read_only(uint8[:, ::1]), float32[:, ::1], int64, int64, int64)
def _dequantise(rows: AnyArray, vectors: FloatArray, codes_at: int, scale_at: int, scale_bytes: int) -> int:
    """Write vectors; return how many rows precede one whose scale or offset is not a number of a row, or all."""
    for i in range(vectors.shape[0]):
        scale = _number(rows[i], scale_at, scale_bytes)
        offset = _number(rows[i], scale_at + scale_bytes, scale_bytes)
        if not (np.float32(0.0) <= scale < np.float32(np.inf) and abs(offset) < np.float32(np.inf)):
            return i
        for j in range(vectors.shape[1]):
            vectors[i, j] = _fma(np.float32(rows[i, codes_at + j]), scale, offset)
    return len(vectors)
