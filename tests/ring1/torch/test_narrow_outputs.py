"""Outputs of float16 and bfloat16 in host memory hold the vectors rounded, on every path that takes tensors."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hps
from hps.ground.rows import decode, encode
from tests.servers.running_service import document_of, model_of

ROWS, DIMS = 500, {"user": 4, "item": 7}
DEFAULTS = {"user": 0.3, "item": -2.1}
"""Neither is exact in 16 bits."""
HALVES = [torch.float16, torch.bfloat16]
KEYS = np.array([3, 499, 3, 1000, 0, -1, 123, 77])
Start = Callable[..., hps.HPS]


def vectors_of(keys: Any, dim: int) -> np.ndarray:
    return (np.asarray(keys)[:, None] * 8 + np.arange(dim) + 0.1).astype(np.float32)


def expected(table: str, keys: np.ndarray, dtype: torch.dtype, row_dtype: str = "float32") -> torch.Tensor:
    """The vectors of keys, as torch rounds what is stored."""
    stored = decode(encode("testing", vectors_of(keys, DIMS[table]), row_dtype), DIMS[table], row_dtype)
    there = (keys >= 0) & (keys < ROWS)
    return torch.from_numpy(np.where(there[:, None], stored, np.float32(DEFAULTS[table]))).to(dtype)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    for table, dim in DIMS.items():
        hps.write_sparse_model(tmp_path / table, (np.arange(ROWS), vectors_of(range(ROWS), dim)))
    servers = []

    def started(**changes: Any) -> hps.HPS:
        settings = {"gpucacheper": 0.3, "hit_rate_threshold": 1.1, "default_value_for_each_table": [*DEFAULTS.values()]}
        model = model_of("m", [tmp_path / table for table in DIMS], DIMS, **settings | changes)
        servers.append(hps.HPS(document_of(model)))
        return servers[-1]

    yield started
    for server in servers:
        server.close()


@pytest.fixture(params=[True, False], ids=["cached", "direct"])
def server(request: pytest.FixtureRequest, start: Start) -> hps.HPS:
    return start(gpucache=request.param)


@pytest.mark.parametrize(
    ("cached", "row_dtype", "user", "item"),
    [
        (True, "int8", *HALVES),
        (False, "int8", torch.float32, HALVES[1]),
        (True, "float16", HALVES[1], torch.float32),
        (False, "bfloat16", HALVES[0], HALVES[0]),
    ],
)
def test_outputs_of_any_dtypes_round_what_rows_in_fewer_bits_stand_for(
    start: Start, cached: bool, row_dtype: str, user: torch.dtype, item: torch.dtype
) -> None:
    server = start(gpucache=cached, row_dtype=row_dtype)
    outs = {"user": torch.zeros(8, 4, dtype=user), "item": torch.zeros(8, 7, dtype=item)}
    for _missed_then_resident in range(2):
        server.lookup_tables(dict.fromkeys(DIMS, KEYS), "m", out=outs)
        for table, out in outs.items():
            assert torch.equal(out, expected(table, KEYS, out.dtype, row_dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_lookup_fromdlpack_fills_the_beginning_of_a_larger_tensor(server: hps.HPS, dtype: torch.dtype) -> None:
    for _missed_then_resident in range(2):
        out = torch.full((3, 3, 7), 9.0, dtype=dtype)
        found = server.lookup_fromdlpack(torch.from_numpy(KEYS.reshape(2, 4)), out, "m", "item", return_found=True)
        assert found.tolist() == [True, True, True, False, True, False, True, True]
        assert torch.equal(out.view(9, 7)[:8], expected("item", KEYS, dtype))
        assert (out.view(9, 7)[8] == 9).all()
    assert server.lookup_fromdlpack(KEYS[:1], out, "m", "item") is None
    assert server.lookup_fromdlpack(KEYS[:0], torch.zeros(0, dtype=dtype), "m", "item", return_found=True).size == 0


@pytest.mark.parametrize(
    ("counts", "dtype"), [((3, 5), HALVES[0]), ((0, 8), HALVES[1]), ((8, 0), HALVES[0]), ((0, 0), HALVES[1])]
)
def test_lookup_concatenated_rounds_the_vectors_of_every_table(
    server: hps.HPS, counts: tuple[int, int], dtype: torch.dtype
) -> None:
    keys, size = KEYS[: sum(counts)], counts[0] * 4 + counts[1] * 7
    wanted = torch.cat([expected("user", keys[: counts[0]], dtype).ravel(), expected("item", keys[counts[0] :], dtype).ravel()])
    for return_found in (True, False):
        out = torch.full((size + 3,), 9.0, dtype=dtype)
        found = server.lookup_concatenated(torch.from_numpy(keys), counts, out, "m", return_found=return_found)
        assert torch.equal(out[:size], wanted)
        assert out[size:].tolist() == [9.0] * 3
        assert found is None if not return_found else np.array_equal(found, (keys >= 0) & (keys < ROWS))


@pytest.mark.parametrize("dtype", HALVES)
def test_every_kind_of_number_is_rounded_as_torch_rounds_it(server: hps.HPS, dtype: torch.dtype) -> None:
    """Ties, what is too large, subnormals, both zeros, infinities and NaN; without a warning."""
    nearest = float(torch.finfo(dtype).eps) / 2
    rows = np.array(
        [
            [1 + nearest, 1 + 3 * nearest, 1 + nearest * 1.01, -1 - nearest, 65_519.9, 65_520, -65_520],
            [0.0, -0.0, 1e-7, 3e-8, -2e-8, 6e-39, 1e-45],
            [3.4e38, -3.4e38, np.inf, -np.inf, np.nan, 0.1, 65_504],
        ],
        np.float32,
    )
    server.insert(KEYS[4:7], rows, "m", "item")
    out = torch.zeros(3, 7, dtype=dtype)
    server.lookup_fromdlpack(KEYS[4:7], out, "m", "item")
    wanted = torch.from_numpy(rows).to(dtype)
    nan = wanted.isnan()  # of which there are many
    assert torch.equal(out.isnan(), nan)
    assert torch.equal(out[~nan].view(torch.int16), wanted[~nan].view(torch.int16))


@pytest.mark.parametrize("dtype", ["float64", "int16", "uint16", "int32", "complex64", "bool"])
def test_other_dtypes_are_refused_by_name(server: hps.HPS, dtype: str) -> None:
    """Codes of bfloat16 in an array of uint16 are no bfloat16."""
    out, good = np.zeros((8, 4), dtype), torch.full((8, 7), 9.0, dtype=torch.float16)
    for call in (
        lambda: server.lookup_fromdlpack(KEYS, out, "m", "user"),
        lambda: server.lookup_fromdlpack(KEYS, torch.from_numpy(out), "m", "user"),
        lambda: server.lookup_tables({"item": KEYS, "user": KEYS}, "m", out={"item": good, "user": out}),
        lambda: server.lookup_concatenated(KEYS, (8, 0), out, "m"),
    ):
        with pytest.raises(hps.InvalidDtypeError, match=rf"got {dtype}, expected float32, float16 or bfloat16"):
            call()
    assert (good == 9).all()


def test_tensors_that_cannot_take_the_vectors_are_refused(server: hps.HPS) -> None:
    read_only = np.zeros((8, 4), np.float16)
    read_only.flags.writeable = False
    for out, message in (
        (torch.zeros(31, dtype=HALVES[0]), "with 31 elements, expected at least 32 for 8 vectors of 4"),
        (torch.zeros(8, 8, dtype=HALVES[1])[:, ::2], "C-contiguous"),
        (np.zeros((4, 8), np.float16).T, "C-contiguous"),
        (read_only, "read-only"),
        (np.zeros(8 * 4 * 2 + 1, np.uint8)[1:].view(np.float16), "not aligned to float16"),
    ):
        with pytest.raises(hps.InvalidInputError, match=message):
            server.lookup_fromdlpack(KEYS, out, "m", "user")
        assert (out == 0).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_prepared_and_pooled_lookups_refuse_them_by_name(server: hps.HPS, dtype: torch.dtype) -> None:
    message = rf"got {str(dtype).removeprefix('torch.')}, expected float32; allocate"
    keys = torch.from_numpy(KEYS)
    for call in (
        lambda: server.prepare({"user": keys}, "m", out={"user": torch.zeros(8, 4, dtype=dtype)}),
        lambda: server.lookup_pooled({"user": hps.Bags(KEYS.reshape(4, 2))}, "m", out={"user": torch.zeros(4, 4, dtype=dtype)}),
        lambda: server.lookup_pooled({"user": hps.Bags(KEYS.reshape(4, 2))}, "m", out=torch.zeros(4, 4, dtype=dtype)),
    ):
        with pytest.raises(hps.InvalidDtypeError, match=message):
            call()


def test_a_numpy_array_of_float16_is_filled(server: hps.HPS) -> None:
    out = {"item": np.full((2, 8, 7), 9, np.float16), 0: np.zeros(8 * 4, np.float16)}
    vectors, found = server.lookup_tables({"item": KEYS, 0: KEYS}, "m", out=out, return_found=True)
    assert [vectors[name] is out[name] for name in out] == [True, True]
    np.testing.assert_array_equal(out["item"][0], expected("item", KEYS, torch.float16).numpy())
    assert (out["item"][1] == 9).all()
    np.testing.assert_array_equal(out[0].reshape(8, 4), expected("user", KEYS, torch.float16).numpy())
    assert [mask.tolist() for mask in found.values()] == [((KEYS >= 0) & (KEYS < ROWS)).tolist()] * 2
