"""Tables whose keys and vectors follow each other in one tensor each, on a CUDA device."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hps
from hps.tools.cli.tables.sample import sample_chunks, sample_vectors
from tests.gpu.cupy_if_installed import cupy
from tests.servers.running_service import document_of, model_of

pytestmark = pytest.mark.gpu
DIMS, ROWS = (16, 7, 1, 128), 2000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[hps.HPS]:
    for index, dim in enumerate(DIMS):
        hps.write_sparse_model(tmp_path / f"t{index}", sample_chunks(ROWS, dim, index))
    sources = [tmp_path / f"t{index}" for index in range(len(DIMS))]
    changes = {"default_value_for_each_table": [-1.0] * len(DIMS), "max_batch_size": 10_000, "hit_rate_threshold": 1.1}
    model = model_of(
        "m", sources, {path.name: dim for path, dim in zip(sources, DIMS, strict=True)}, gpucacheper=0.5, **changes
    )
    with hps.HPS(document_of(model, device="cuda")) as server:
        yield server


def wanted(keys: np.ndarray, counts: tuple[int, ...]) -> np.ndarray:
    rows, start = [], 0
    for index, (n, dim) in enumerate(zip(counts, DIMS, strict=True)):
        part = keys[start : start + n]
        vectors = np.where((part < ROWS)[:, None], sample_vectors(part, dim, index), np.float32(-1))
        rows.append(vectors.ravel())
        start += n
    return np.concatenate(rows)


@pytest.mark.parametrize("counts", [(3, 5, 0, 9), (700, 1000, 900, 300), (0, 0, 1, 0), (0, 0, 0, 0)])
@pytest.mark.parametrize("place", ["torch", "cupy", "keys on the host", "out on the host", "int32"])
@pytest.mark.parametrize("return_found", [False, True])
def test_every_vector_is_right_wherever_keys_and_outputs_are(
    server: hps.HPS, counts: tuple[int, ...], place: str, return_found: bool
) -> None:
    rng = np.random.default_rng(5)
    for _ in range(3):
        keys = rng.integers(0, ROWS + 50, sum(counts))
        size = sum(n * dim for n, dim in zip(counts, DIMS, strict=True))
        given: Any = cupy.asarray(keys) if place == "cupy" else torch.from_numpy(keys).cuda()
        out: Any = cupy.full(size + 5, cupy.nan, cupy.float32) if place == "cupy" else torch.full((size + 5,), torch.nan).cuda()
        if place == "keys on the host":
            given = keys
        elif place == "out on the host":
            out = np.full(size + 5, np.nan, np.float32)
        elif place == "int32":
            given = given.to(torch.int32)
        found = server.lookup_concatenated(given, counts, out, "m", return_found=return_found)
        got = out if isinstance(out, np.ndarray) else out.get() if place == "cupy" else out.cpu().numpy()
        np.testing.assert_array_equal(got[:size], wanted(keys, counts))
        assert np.isnan(got[size:]).all()
        if return_found:
            np.testing.assert_array_equal(found, keys < ROWS)


def test_requests_of_many_sizes_and_alignments_follow_each_other(server: hps.HPS) -> None:
    rng = np.random.default_rng(6)
    sizes = [tuple(rng.integers(0, 40, len(DIMS)).tolist()) for _ in range(70)]
    whole = torch.empty(40 * sum(DIMS) + 4).cuda()
    for counts in sizes + sizes[::-1]:
        keys = rng.integers(0, ROWS + 50, sum(counts))
        first = int(rng.integers(4))
        out = whole[first : first + sum(n * dim for n, dim in zip(counts, DIMS, strict=True))]
        whole.fill_(torch.nan)
        if rng.integers(2):
            server.lookup_concatenated(torch.from_numpy(keys).cuda(), counts, out, "m")
        else:
            starts = np.cumsum([0, *counts])
            parts = {t: torch.from_numpy(keys[starts[t] : starts[t + 1]]).cuda() for t in rng.permutation(len(DIMS)).tolist()}
            ends = np.cumsum([0, *(n * dim for n, dim in zip(counts, DIMS, strict=True))])
            server.lookup_tables(parts, "m", out={t: out[ends[t] : ends[t + 1]] for t in parts})
        np.testing.assert_array_equal(out.cpu().numpy(), wanted(keys, counts))
        assert int(torch.isnan(whole).sum()) == whole.numel() - out.numel()


KINDS = ["torch", "cupy", "mixed", "keys of one on the host", "out of one on the host", "torch on the host", "int32", "larger"]


@pytest.mark.parametrize("counts", [(3, 5, 0, 9), (700, 1000, 900, 300), (0, 0, 1, 0), (0, 0, 0, 0)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by_id", [False, True])
def test_separate_tensors_of_all_tables_give_the_same_vectors(
    server: hps.HPS, counts: tuple[int, ...], kind: str, by_id: bool
) -> None:
    rng, names = np.random.default_rng(5), [number if by_id else f"t{number}" for number in range(len(DIMS))]
    for _ in range(3):
        keys = rng.integers(0, ROWS + 50, sum(counts))
        parts = np.split(keys, np.cumsum(counts)[:-1])
        of_cupy = [kind == "cupy" or (kind == "mixed" and number % 2) for number in range(len(DIMS))]
        given: Any = {
            name: cupy.asarray(part) if cupys else torch.from_numpy(part.copy()).cuda()
            for name, part, cupys in zip(names, parts, of_cupy, strict=True)
        }
        more = 3 if kind == "larger" else 0
        out: Any = {
            name: cupy.full((n + more, dim), cupy.nan, cupy.float32) if cupys else torch.full((n + more, dim), torch.nan).cuda()
            for name, n, dim, cupys in zip(names, counts, DIMS, of_cupy, strict=True)
        }
        if kind == "keys of one on the host":
            given[names[1]] = parts[1]
        elif kind == "out of one on the host":
            out[names[1]] = np.full((counts[1], DIMS[1]), np.nan, np.float32)
        elif kind == "torch on the host":
            given[names[0]], out[names[1]] = given[names[0]].cpu(), out[names[1]].cpu()
        elif kind == "int32":
            given[names[2]] = given[names[2]].to(torch.int32)
        server.lookup_tables(given, "m", out=out)
        found = [
            out[name].get() if hasattr(out[name], "get") else np.asarray(torch.as_tensor(out[name]).cpu()) for name in names
        ]
        answered = [one[:n].ravel() for one, n in zip(found, counts, strict=True)]
        np.testing.assert_array_equal(np.concatenate(answered), wanted(keys, counts))
        assert all(np.isnan(one[n:]).all() for one, n in zip(found, counts, strict=True))
