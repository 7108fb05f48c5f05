"""Registered segments of shared memory, and requests whose tensors lie there."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps.errors import CapacityError, HPSError, InvalidInputError
from hps.serve.frontend.shared_memory import Place, Segments, SharedTensors, shared_tensors, translate
from hps.serve.http.http_answer import RequestError
from hps.serve.http.shared_memory import SharedMemoryRegistry, check_local

NAME = f"hps-unit-{os.getpid()}"
SEGMENT = Path("/dev/shm") / NAME
SIZE = 4096


@pytest.fixture(scope="module", autouse=True)
def _segment() -> Iterator[None]:
    SEGMENT.write_bytes(np.arange(SIZE // 8).tobytes())
    yield
    SEGMENT.unlink()


def test_clients_on_this_machine_alone_may_share_memory() -> None:
    for client in ("", "127.0.0.1", "127.8.9.10", "::1"):
        check_local(client, {b"host": b"x"})
    others: list[tuple[str, dict[bytes, bytes]]] = [(client, {}) for client in ("10.0.0.5", "fe80::1", "somewhere")]
    others += [("127.0.0.1", {b"x-forwarded-for": b"10.0.0.5"}), ("", {b"via": b""}), ("::1", {b"origin": b"http://x"})]
    for client, headers in others:
        with pytest.raises(RequestError) as caught:
            check_local(client, headers)
        assert caught.value.status == 403
        with pytest.raises(RequestError):
            shared_tensors(b'{"inputs": [], "x": {"shared_memory_region": "r"}}', None, client, headers)


def test_a_limit_that_is_lowered_holds_for_the_next_region() -> None:
    limits, changes = [SIZE], list[int]()
    registry = SharedMemoryRegistry(lambda: limits[0], lambda: changes.append(1))
    registry.register("a", NAME, 0, SIZE)
    with pytest.raises(CapacityError):
        registry.register("b", f"/{NAME}", 0, 8)
    registry.unregister("a")
    limits[0] = 8
    with pytest.raises(CapacityError):
        registry.register("a", NAME, 0, 16)
    registry.register("a", NAME, 0, 8)
    limits[0] = 0
    with pytest.raises(InvalidInputError, match="off"):
        registry.register("c", NAME, 0, 8)
    assert len(changes) == 3


PLACES = st.tuples(st.sampled_from(["first", "second"]), st.integers(0, SIZE // 16))
INPUTS = st.lists(st.tuples(st.integers(0, 5), st.just(("", 0)) | PLACES), min_size=1, max_size=6)


@given(INPUTS)
def test_a_translated_request_has_the_bytes_of_its_places(inputs: list[tuple[int, tuple[str, int]]]) -> None:
    registry, segments = SharedMemoryRegistry(lambda: 1 << 20, lambda: None), Segments()
    registry.register("first", NAME, 0, SIZE)
    registry.register("second", NAME, SIZE // 2, SIZE // 2)
    segments.update(registry.published())
    tensors, sent, expected = [], b"", b""
    for nth, (count, (region, offset)) in enumerate(inputs):
        tensors.append(a_tensor(region, count, offset) | {"name": f"t{nth}"})
        start = offset + (SIZE // 2 if region == "second" else 0)
        keys = SEGMENT.read_bytes()[start : start + 8 * count] if region else np.full(count, -nth).tobytes()
        sent += b"" if region else keys
        expected += keys
    text = json.dumps({"inputs": tensors}, separators=(",", ":")).encode()
    shared = shared_tensors(text + sent, len(text), "", {})
    if shared is None:
        assert not any(region for _, (region, _) in inputs)
        return
    assert bytes(segments.body_of(shared)) == shared.text + expected
    sizes = [load["parameters"]["binary_data_size"] for load in json.loads(shared.text)["inputs"]]
    assert sizes == [8 * count for count, _ in inputs]
    segments.update([])
    with pytest.raises(InvalidInputError, match="Unable to find"):
        segments.body_of(shared)


def open_descriptors(segment: Path = SEGMENT) -> int:
    """How often this process has a segment open."""
    found = 0
    for one in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found += os.readlink(one).startswith(str(segment))  # " (deleted)" may follow
    return found


def a_tensor(region: str, count: int = 1, offset: int = 0) -> dict[str, Any]:
    """An input, in a region or, without one, behind the JSON part."""
    size = "shared_memory_byte_size" if region else "binary_data_size"
    parameters: dict[str, Any] = {size: 8 * count} | ({"shared_memory_region": region} if region else {})
    parameters |= {"shared_memory_offset": offset} if offset else {}
    return {"name": "t", "datatype": "INT64", "shape": [count], "parameters": parameters}


def a_request(*regions: str) -> SharedTensors:
    found = shared_tensors(json.dumps({"inputs": [*map(a_tensor, regions)]}).encode(), None, "", {})
    assert found is not None
    return found


Shared = tuple[SharedMemoryRegistry, Segments]


@pytest.fixture
def shared() -> Iterator[Shared]:
    """The engine's registry, and the segments of a front that follows it."""
    segments = Segments()
    registry = SharedMemoryRegistry(lambda: 1 << 20, lambda: segments.update(registry.published()))
    yield registry, segments
    segments.update([])


def test_a_segment_that_a_client_took_back_is_closed(shared: Shared) -> None:
    """Its memory would be the front's for ever, and a descriptor be lost with each client."""
    registry, segments = shared
    for name in ("first", None, "first"):
        registry.register("first", NAME, 0, SIZE)
        registry.register("second", f"/{NAME}", 8, 8)
        assert open_descriptors() == 0, "it is opened by the first request"
        for _ in range(2):
            segments.body_of(a_request("first", "second"))
            assert open_descriptors() == 1, "once, under however many names"
        registry.unregister(name)
        assert open_descriptors() == (name is not None), "the other name has it still"
        registry.unregister("second")
        assert open_descriptors() == 0


def test_a_segment_that_was_replaced_is_not_used_and_not_kept_open(shared: Shared) -> None:
    registry, segments = shared
    other = SEGMENT.with_name(f"{NAME}-other")
    try:
        other.write_bytes(bytes(8))
        registry.register("r", other.name, 0, 8)
        other.unlink()
        other.write_bytes(bytes(8))
        for _ in range(2):
            with pytest.raises(InvalidInputError, match="its segment was replaced; register it again"):
                segments.body_of(a_request("r"))
            assert open_descriptors(other) == 0
        registry.unregister("r")
        registry.register("r", other.name, 0, 8)
        segments.body_of(a_request("r"))
        assert open_descriptors(other) == 1
    finally:
        other.unlink()


@pytest.fixture
def before() -> Iterator[bytes]:
    """What the segment has, and gets back."""
    found = SEGMENT.read_bytes()
    yield found
    SEGMENT.write_bytes(found)


@pytest.mark.parametrize(("offset", "size", "fits"), [(0, 16, True), (8, 8, True), (8, 9, False), (9, 8, False)])
def test_a_place_lies_within_its_region(shared: Shared, before: bytes, offset: int, size: int, fits: bool) -> None:
    registry, segments = shared
    registry.register("r", NAME, 32, 16)
    tensor = memoryview(b"\xff" * size)
    if fits:
        segments.write(Place("r", offset, size), tensor)
        assert SEGMENT.read_bytes() == before[: 32 + offset] + bytes(tensor) + before[32 + offset + size :]
    else:
        with pytest.raises(InvalidInputError, match="Invalid offset"):
            segments.write(Place("r", offset, size), tensor)
        assert SEGMENT.read_bytes() == before
    with pytest.raises(InvalidInputError, match=rf"\({size - 1} bytes\) should be at least {size} bytes"):
        segments.write(Place("r", 0, size - 1), tensor)


def test_a_segment_that_became_shorter_is_an_error_and_no_longer_again(shared: Shared, before: bytes) -> None:
    """A write beyond the end would make it longer, with memory that nobody counts."""
    registry, segments = shared
    registry.register("r", NAME, 0, 16)
    os.truncate(SEGMENT, 7)
    for call in (lambda: segments.write(Place("r", 0, 8), memoryview(bytes(8))), lambda: segments.body_of(a_request("r"))):
        with pytest.raises(InvalidInputError, match="has become shorter than registered"):
            call()
    assert SEGMENT.stat().st_size == 7


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
PARAMETERS = st.fixed_dictionaries(
    {"shared_memory_region": VALUES | st.just("r"), "shared_memory_byte_size": VALUES | st.just(1 << 62)},
    optional={"shared_memory_offset": VALUES, "binary_data_size": VALUES},
)
SHAPED = {"name": VALUES, "datatype": VALUES | st.just("INT64"), "shape": VALUES | st.just([2])}
TENSORS = st.fixed_dictionaries({}, optional={**SHAPED, "parameters": PARAMETERS | VALUES})


@given(
    st.fixed_dictionaries({}, optional={"inputs": st.lists(TENSORS | VALUES) | VALUES, "outputs": st.lists(TENSORS) | VALUES})
)
def test_any_json_is_translated_or_refused(document: dict[str, Any]) -> None:
    with suppress(HPSError):
        translate(json.dumps(document).encode())
