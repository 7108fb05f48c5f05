"""Any directory whatever is either read as the rows it holds, or refused with a `ModelFileError`."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from hps.errors import ModelFileError
from hps.models.files import open_sparse_model
from tests.tables.sparse_models import chunks_of

MAX_BYTES = 400
sizes = st.integers(0, MAX_BYTES) | st.sampled_from([0, 1, 7, 8, 9, 64, 128, 256])
contents = sizes.flatmap(lambda n: st.binary(min_size=n, max_size=n))
entries = st.one_of(st.none(), contents, st.sampled_from(["directory", "pipe", "broken link"]))


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory for one example; fixtures last for all examples of a test."""
    path = Path(tempfile.mkdtemp(prefix="hps-test-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def put(path: Path, entry: bytes | str | None) -> None:
    """Put a file of these bytes, something else, or nothing in a place."""
    if isinstance(entry, bytes):
        path.write_bytes(entry)
    elif entry == "directory":
        path.mkdir()
    elif entry == "pipe":
        os.mkfifo(path)
    elif entry == "broken link":
        path.symlink_to("nowhere")


@settings(max_examples=150)
@given(entries, entries, st.one_of(st.none(), entries), st.integers(1, 20), st.integers(1, 10), st.booleans())
def test_a_random_directory_gives_its_rows_or_a_model_file_error(key, vectors, meta, dim, chunk_rows, int32_keys):
    with scratch() as directory:
        for name, entry in (("key", key), ("emb_vector", vectors), ("meta", meta)):
            put(directory / name, entry)
        fits = (
            isinstance(key, bytes)
            and isinstance(vectors, bytes)
            and len(key) > 0
            and len(key) % 8 == 0
            and len(vectors) == len(key) // 8 * dim * 4
            and (meta in (None, "broken link") or (isinstance(meta, bytes) and len(meta) == len(key)))
        )
        if fits and int32_keys:
            keys = np.frombuffer(key, "<i8")
            fits = bool(((keys >= 0) & (keys < 2**32)).all())
        event("fits" if fits else "does not fit")
        try:
            model = open_sparse_model(directory, dim, int32_keys=int32_keys)
            chunks = list(chunks_of(model, chunk_rows))
        except ModelFileError:
            assert not fits
            return
        assert fits
        assert b"".join(k.tobytes() for k, _ in chunks) == key
        assert b"".join(v.tobytes() for _, v in chunks) == vectors
        assert model.rows == len(key) // 8


@settings(max_examples=80)
@given(st.data(), st.integers(1, 40), st.integers(1, 9), st.integers(1, 15))
def test_a_model_that_fits_is_read_and_any_other_size_is_refused(data, rows, dim, chunk_rows):
    key = data.draw(st.binary(min_size=8 * rows, max_size=8 * rows))
    vectors = data.draw(st.binary(min_size=4 * dim * rows, max_size=4 * dim * rows))
    with scratch() as directory:
        put(directory / "key", key)
        put(directory / "emb_vector", vectors)
        start, model = data.draw(st.integers(0, rows)), open_sparse_model(directory, dim)
        assert (model.rows, model.dim, model.size_bytes) == (rows, dim, rows * (8 + 4 * dim))
        chunks = list(chunks_of(model, chunk_rows, start))
        assert b"".join(k.tobytes() for k, _ in chunks) == key[8 * start :]
        assert b"".join(v.tobytes() for _, v in chunks) == vectors[4 * dim * start :]
        assert {k.size for k, _ in chunks[:-1]} <= {chunk_rows}
        name = data.draw(st.sampled_from(["key", "emb_vector"]))
        size = len(key) if name == "key" else len(vectors)
        os.truncate(directory / name, data.draw(st.integers(0, 2 * size).filter(lambda n: n != size)))
        with pytest.raises(ModelFileError, match=str(directory)):
            open_sparse_model(directory, dim)


@settings(max_examples=50)
@given(st.text(max_size=40) | st.from_regex(r"\A[A-Za-z]{1,6}:/{0,3}[a-z0-9./:%]{0,30}\Z"))
@example("C:\\models\\item")
@example("v1/a:b")
@example("a\0b")
@example("x" * 5000)
def test_any_text_for_a_place_without_a_model_is_refused(source):
    with scratch() as directory, contextlib.chdir(directory), pytest.raises(ModelFileError, match=r"opening|listing"):
        open_sparse_model(source, 4)
