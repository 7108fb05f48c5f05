"""Rows of fewer bits: what encoding keeps, what it loses, and what it refuses; against NumPy, PyTorch and FBGEMM."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hps.errors import InvalidInputError
from hps.ground.rows import decode, encode
from hps.types import ROW_DTYPES, FloatArray, row_width

FEWER_BITS = ROW_DTYPES[1:]
HALVES = ("float16", "bfloat16")


def bits(array: FloatArray) -> np.ndarray:
    """The bit patterns, so that NaN equals NaN and -0.0 differs from 0.0."""
    return np.ascontiguousarray(array).view(np.uint32)


@st.composite
def vectors(draw: st.DrawFn, largest: float = 65504.0) -> FloatArray:
    """Rows of one dim: small, large, subnormal, constant, alike and far from 0, full of zeros of both signs."""
    dim, n = draw(st.integers(1, 256)), draw(st.integers(1, 12))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["normal", "scales", "constant", "alike", "zeros", "subnormal", "huge", "few", "floats"]))
    made = random.standard_normal((n, dim))
    if kind == "scales":
        made *= 10.0 ** random.integers(-8, 4, (n, 1))
    elif kind == "constant":
        made = np.repeat(made[:, :1] * 10.0 ** random.integers(-8, 4), dim, axis=1)
    elif kind == "alike":
        made = 10.0 ** random.integers(-4, 5, (n, 1)) * (1 + made * 10.0 ** -random.integers(2, 9, (n, 1)))
    elif kind == "zeros":
        made = np.where(made > 0, 0.0, -0.0)
    elif kind == "subnormal":
        made *= 10.0 ** random.integers(-45, -36, (n, 1))
    elif kind == "huge":
        made = np.where(made > 0, largest, -largest) * random.uniform(0.9, 1, (n, dim))
    elif kind == "few":
        made = random.choice([-1.0, 0.0, 2.0, 0.1], (n, dim))
    elif kind == "floats":
        element = st.floats(-largest, largest, width=32)
        made = np.array(draw(st.lists(element, min_size=dim, max_size=dim)))[None, :]
    return np.clip(made, -largest, largest).astype(np.float32)


def held(own: FloatArray) -> FloatArray:
    """The rows whose range is not too small for int8."""
    kept = np.zeros(len(own), bool)
    for i in range(len(own)):
        with suppress(InvalidInputError):
            kept[i] = len(encode("x", own[i : i + 1], "int8")) > 0
    return own[kept]


class TestEncoding:
    @pytest.mark.parametrize("row_dtype", FEWER_BITS)
    @given(own=vectors())
    @settings(max_examples=100)
    def test_rows_that_are_decoded_and_encoded_stay(self, row_dtype: str, own: FloatArray) -> None:
        own = held(own) if row_dtype == "int8" else own
        rows = encode("x", own, row_dtype)
        assert rows.shape == (len(own), row_width(own.shape[1], row_dtype))
        again = encode("x", decode(rows, own.shape[1], row_dtype), row_dtype)
        np.testing.assert_array_equal(bits(again), bits(rows))

    @pytest.mark.parametrize("row_dtype", FEWER_BITS)
    def test_rows_of_every_dim_stay_and_end_in_zeros(self, row_dtype: str) -> None:
        random = np.random.default_rng(3)
        for dim in range(1, 257):
            own = random.standard_normal((20, dim)).astype(np.float32)
            rows = encode("x", own, row_dtype)
            np.testing.assert_array_equal(bits(encode("x", decode(rows, dim, row_dtype), row_dtype)), bits(rows))
            used = dim if row_dtype == "int8" else 2 * dim
            end = rows.shape[1] * 4 - (4 if row_dtype == "int8" else 0)
            assert not rows.view(np.uint8)[:, used:end].any()

    @given(own=vectors())
    @settings(max_examples=100)
    def test_an_int8_row_is_off_by_a_16th_of_its_largest_element_or_refused(self, own: FloatArray) -> None:
        for row in own:
            largest = np.abs(row.astype(np.float64)).max()
            if not held(row[None]).size:
                assert largest < 1e-3
                continue
            got = decode(encode("x", row[None], "int8"), row.size, "int8")
            assert np.abs(got - row.astype(np.float64)).max() <= largest / 16

    @given(own=vectors())
    @settings(max_examples=100)
    def test_int8_is_off_by_a_step_and_what_float16_rounds(self, own: FloatArray) -> None:
        """By most half a step, a quarter at the ends, and what float16 rounds of the offset and of 255 scales."""
        own = held(own)
        low, high = own.min(axis=1).astype(np.float64), own.max(axis=1).astype(np.float64)
        rounded = np.maximum(np.abs(low), np.abs(high)) * 2.0**-11 + 2.0**-24  # half a unit of float16, and its subnormals
        step = (high - low + rounded) / 255 * (1 + 2.0**-10) + 2.0**-24
        got = decode(encode("x", own, "int8"), own.shape[1], "int8").astype(np.float64)
        limit = np.maximum(step / 2 + rounded + 255 * step * 2.0**-11 + 255 * 2.0**-25, (high - low) / 2 + rounded * 2)
        assert (np.abs(got - own) <= limit[:, None]).all()

    @given(own=vectors())
    def test_float16_is_what_numpy_makes(self, own: FloatArray) -> None:
        got = decode(encode("x", own, "float16"), own.shape[1], "float16")
        np.testing.assert_array_equal(bits(got), bits(own.astype(np.float16).astype(np.float32)))

    @given(own=vectors(largest=float.fromhex("0x1.fep127")))
    def test_bfloat16_is_what_pytorch_makes(self, own: FloatArray) -> None:
        torch = pytest.importorskip("torch")
        got = decode(encode("x", own, "bfloat16"), own.shape[1], "bfloat16")
        np.testing.assert_array_equal(bits(got), bits(torch.from_numpy(own).bfloat16().float().numpy()))

    @pytest.mark.parametrize("row_dtype", HALVES)
    def test_every_value_of_16_bits_is_kept(self, row_dtype: str) -> None:
        """Subnormals, infinities and both zeros, bit for bit; NaN as NaN."""
        halves = np.arange(1 << 16, dtype=np.uint16)
        floats = (halves.astype(np.uint32) << 16).view(np.float32)
        own = halves.view(np.float16).astype(np.float32) if row_dtype == "float16" else floats
        rows = encode("x", own.reshape(-1, 64), row_dtype)
        got = decode(rows, 64, row_dtype).ravel()
        numbers = ~np.isnan(own)
        np.testing.assert_array_equal(bits(got[numbers]), bits(own[numbers]))
        assert np.isnan(got[~numbers]).all()

    def test_float32_is_the_vectors_themselves(self) -> None:
        own = np.ones((3, 5), np.float32)
        assert encode("x", own, "float32") is own
        assert decode(own, 5, "float32") is own


class TestRanges:
    @pytest.mark.parametrize("ends", [(-65504.0, 65504.0), (-65504.0, 16_000_000.0), (65504.0, 16_000_000.0)])
    def test_int8_holds_what_its_scale_reaches(self, ends):
        own = np.array([[*ends, sum(ends) / 2]], np.float32)
        rows = encode("x", own, "int8")
        got = decode(rows, 3, "int8")
        assert (np.abs(got - own) <= (ends[1] - ends[0]) / 255).all()
        np.testing.assert_array_equal(bits(encode("x", got, "int8")), bits(rows))


def _alike(own: FloatArray) -> None:
    """Compare what int8 rows decode to with FBGEMM's `Fused8BitRowwise` of the same codes, scales and offsets."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("fbgemm_gpu")
    dim = own.shape[1]
    rows = encode("x", own, "int8")
    raw = rows.view(np.uint8)
    pair = raw[:, -4:].copy().view(np.float16).astype(np.float32)  # FBGEMM's row: codes, then float32 scale and offset
    fused = np.concatenate([raw[:, :dim], np.ascontiguousarray(pair).view(np.uint8)], axis=1)
    theirs = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(torch.from_numpy(fused)).numpy()
    ours = decode(rows, dim, "int8")
    # FBGEMM may round product and sum at once; a product of 8 and 11 bits is exact, so both round once.
    np.testing.assert_array_equal(bits(ours), bits(theirs))


@pytest.mark.parametrize("dim", [4, 16, 64, 128, 256])
def test_int8_decodes_as_fbgemm_does(dim: int) -> None:
    random = np.random.default_rng(dim)
    _alike((random.standard_normal((100_000 // dim, dim)) * 10.0 ** random.integers(-2, 4, (100_000 // dim, 1))).astype("f4"))
