"""Requests in slots: the engine accepts every descriptor, no parts overlap, and both ways to an answer give its bytes."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hps.errors import NotReadyError, UnknownDeviceError
from hps.regions import layout
from hps.regions.exchange import H_FLAGS, H_SCRATCH, H_SCRATCH_BYTES, H_SEGMENTS, HEADER_WORDS, read_handed_over
from hps.regions.layout import HEADER_BYTES, MOST_SEGMENTS, POOLED, SEGMENT_WORDS, SLAB, TRACED
from hps.regions.loop_state import LoopState
from hps.serve.engine.batches import _batch_of
from hps.serve.frontend.answers import HEAD_BYTES, SCRATCH_BYTES
from hps.serve.frontend.lookups import TRACE_BYTES, Placed, read_cached
from hps.serve.frontend.published import FrontendVersion
from hps.serve.http.http_metrics import InferenceCounts
from hps.serve.protocol.json_lookup import decode_lookup
from hps.serve.protocol.open_inference import decode_inference
from hps.serve.protocol.request_checks import ModelTables
from hps.tensors.batch import Batch
from hps.types import TableSpec
from tests.fakes.inferences import body_of, decode_request
from tests.fakes.region_front import RegionFront
from tests.servers.binary_tensors import with_tensors
from tests.tables.batches import by_table

DIMS, MOST_KEYS = (2, 5, 1), 40
NAMES = ("user", "item", "word")
TABLES = tuple(TableSpec("m", name, dim, 0.0, MOST_KEYS) for name, dim in zip(NAMES, DIMS, strict=True))
MODEL = ModelTables("m", TABLES)
FRONT = RegionFront(4 << 20)
LOOP_STATE = LoopState([FRONT.memory], [FRONT.event], -1, -1, 0)
DEPLOYMENT_ID = LOOP_STATE.add(TABLES, None)
DEPLOYMENT = SimpleNamespace(dims=DIMS, tables=TABLES)
SLOT = SLAB + 8192


def vectors_of(table, keys):
    """What the engine answers here: each element says its table, key and column."""
    dim = DIMS[table]
    return (10_000 * table + 7 * keys[:, None] + np.arange(dim) / 8).astype(np.float32)


def found_of(keys):
    return keys % 3 != 0


def read(slot=SLOT):
    """Read a descriptor as the engine does; return its header and segments."""
    header, segments = np.zeros(HEADER_WORDS, np.int64), np.zeros((MOST_SEGMENTS, SEGMENT_WORDS), np.int64)
    assert read_handed_over(LOOP_STATE.regions, 0, slot, LOOP_STATE.deployments, LOOP_STATE.tables, header, segments) == 0
    return header, segments[: header[H_SEGMENTS]].tolist()


def assert_parts(size, slot=SLOT):
    """The parts of a request lie within its slot and do not overlap: descriptor, scratch, keys, HTTP head, vectors, masks."""
    header, segments = read(slot)
    parts = [(slot, slot + HEADER_BYTES + 8 * SEGMENT_WORDS * len(segments))]
    parts.append((header[H_SCRATCH], header[H_SCRATCH] + header[H_SCRATCH_BYTES]))
    for table, n, keys, out, found in segments:
        if n:
            parts.append((keys, keys + 8 * n))
            if not header[H_FLAGS] & POOLED:
                parts.append((out, out + 4 * n * DIMS[table]))
            if found:
                parts.append((found, found + n))
    ordered = sorted((int(start), int(stop)) for start, stop in parts if start != stop)
    assert ordered[-1][1] <= slot + size
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ordered))
    return header, segments


def place(request, traced=False):
    """Write a request into its slot, and nothing else; return it and what the engine reads."""
    FRONT.memory.bytes[SLAB:] = 0x5A
    placed = Placed(request, traced)
    placed.write(FRONT.memory, SLOT, DEPLOYMENT_ID)
    assert (FRONT.memory.bytes[SLAB:SLOT] == 0x5A).all()
    return placed, *assert_parts(placed.size)


def assert_untouched(size):
    """Nothing was written behind a request."""
    assert (FRONT.memory.bytes[SLOT + size :] == 0x5A).all()


def answer(segments):
    """Answer a request in the region, as the engine does."""
    memory = FRONT.memory
    for table, n, keys_at, out_at, found_at in segments:
        keys = memory.bytes[keys_at : keys_at + 8 * n].view(np.int64)
        memory.bytes[out_at : out_at + 4 * n * DIMS[table]] = vectors_of(table, keys).view(np.uint8).reshape(-1)
        if found_at:
            memory.bytes[found_at : found_at + n] = found_of(keys)


def encoded(request):
    """All bytes of an encoded answer."""
    text, binary, length = request.encode(None, 0)
    return b"".join([*text, *map(bytes, binary)]), length


def decoded(body, length):
    """A request with memory of its own."""
    return decode_request(body, length, MODEL, 1000)


def in_process(request):
    """The answer of a request without a region."""
    for one in by_table(request.batch):
        one.out[...] = vectors_of(one.table, one.keys)
        if one.found is not None:
            one.found[...] = found_of(one.keys)
    request.device_id = 0
    return body_of(request)


keys = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=12)
flags = st.booleans()


@st.composite
def requests(draw):
    """The JSON part and the binary part of requests that name tables as Triton's clients do."""
    binary, inputs, outputs = b"", [], []
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1)):
        values = np.array(draw(keys), np.int64)
        rows = draw(st.sampled_from([1, 2]))
        shape = [rows, values.size // rows] if values.size % rows == 0 and draw(flags) else [values.size]
        tensor = {"name": name, "datatype": "INT64", "shape": shape}
        if draw(st.integers(0, 5)):
            tensor["parameters"] = {"binary_data_size": values.nbytes}
            binary += values.tobytes()
        else:
            tensor["data"] = values.tolist()
        inputs.append(tensor)
        for one in (name, f"{name}.found") if draw(flags) else (name,):
            parameters = {"binary_data": draw(st.integers(0, 5)) > 0}
            if one == name and draw(flags):
                kinds = ["FP32", "FP16", "BF16"] if parameters["binary_data"] else ["FP16"]
                parameters["datatype"] = draw(st.sampled_from(kinds))
            outputs.append({"name": one, "parameters": parameters})
    more = {"found": flags, "DeviceID": st.sampled_from([0, 3, 12]), "datatype": st.just("FP16")}
    parameters = {"binary_data_output": draw(st.integers(0, 5)) > 0, **draw(st.fixed_dictionaries({}, optional=more))}
    request = {"inputs": inputs, "parameters": parameters} | ({"outputs": outputs} if draw(flags) else {})
    if draw(flags):
        request["id"] = "x" * draw(st.integers(0, 300))
    return orjson.dumps(request), binary


@settings(max_examples=150)
@given(requests())
def test_planned_and_placed_requests_are_answered_as_those_in_process(request):
    text, binary = request
    expected, length = in_process(decoded(text + binary, len(text)))
    memory = FRONT.memory
    placed, _, segments = place(decode_inference(text + binary, len(text), MODEL, 1000))
    answer(segments)
    assert encoded(placed) == (expected, length)
    assert_untouched(placed.size)

    plan = read_cached(text, None, MODEL, 1000).plan
    if plan is None:
        return
    memory.bytes[SLAB:] = 0x5A
    memory.view[SLOT : SLOT + len(plan.descriptor)] = plan.descriptor
    memory[SLOT] = DEPLOYMENT_ID
    memory.view[SLOT + plan.keys_at : SLOT + plan.keys_at + plan.keys_bytes] = binary
    header, segments = assert_parts(plan.size)
    assert (header[H_FLAGS], header[H_SCRATCH_BYTES], plan.keys_bytes) == (0, SCRATCH_BYTES, len(binary))
    begin = SLOT + plan.vectors_at - len(plan.text)
    assert SLOT + plan.keys_at + plan.keys_bytes <= begin - HEAD_BYTES  # for the HTTP head and the JSON part
    answer(segments)
    if plan.layout is not None:
        plan.layout.convert(memory.bytes[begin : begin + plan.layout.size])
    assert (plan.text + bytes(memory.view[SLOT + plan.vectors_at : SLOT + plan.end]), len(plan.text)) == (expected, length)
    assert plan.device == json.loads(text)["parameters"].get("DeviceID")
    assert_untouched(plan.size)


def planned_text(**change):
    inputs = [{"name": "user", "datatype": "INT64", "shape": [3], "parameters": {"binary_data_size": 24}}]
    return orjson.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}} | change)


def test_what_all_keys_may_change_has_a_plan():
    binary = {"binary_data_output": True}
    for change in ({}, {"id": "a"}, {"parameters": binary | {"found": True}}):
        assert read_cached(planned_text(**change), None, MODEL, 1000).plan is not None
    for parameters in (binary | {"report": True}, {}):  # its answer is JSON
        assert read_cached(planned_text(parameters=parameters), None, MODEL, 1000).plan is None


def test_a_plan_belongs_to_one_version_of_a_model():
    wider = ModelTables("m", (TableSpec("m", "user", 8, 0.0, MOST_KEYS),), "2")
    plans = [read_cached(planned_text(), None, model, 1000).plan for model in (MODEL, wider, MODEL)]
    assert plans[0] is plans[2]
    assert [plan.end - plan.vectors_at for plan in plans[:2]] == [24, 96]
    assert b'"2"' in plans[1].text


@given(st.dictionaries(st.sampled_from(NAMES), keys, min_size=1), flags, st.sampled_from([None, 0, 5]))
def test_lookups_as_json_are_placed_and_answered(tables, found, device):
    body = orjson.dumps({"tables": tables, "found": found, "device": device})
    expected = in_process(decode_lookup(body, MODEL, 1000))[0]
    placed, _, segments = place(decode_lookup(body, MODEL, 1000))
    assert placed.keys == sum(map(len, tables.values()))
    answer(segments)
    assert encoded(placed) == (expected, None)
    assert_untouched(placed.size)


def test_a_traced_request_has_room_for_its_trace():
    for traced, flag, room in ((False, 0, SCRATCH_BYTES), (True, TRACED, TRACE_BYTES)):
        _, header, _ = place(decode_lookup(b'{"tables": {"user": [1], "item": []}}', MODEL, 1000), traced)
        assert (header[H_FLAGS], header[H_SCRATCH_BYTES]) == (flag, room)
        assert (FRONT.memory[SLOT + layout.DEPLOYMENT_ID], FRONT.memory[SLOT + layout.SEGMENTS]) == (DEPLOYMENT_ID, 2)


bags = st.dictionaries(st.sampled_from(NAMES), st.lists(st.lists(st.integers(-9, 99), max_size=4), max_size=6), min_size=1)
OPTIONS = {"combiner": ["sum", "mean", "sqrtn"], "max_norm": [0.5, 2], "padding_key": [0, -3]}
options = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in OPTIONS.items()})


def owned_tables(slot=SLOT):
    """The tables as the engine makes them of a pooled request."""
    header, words = read(slot)
    assert header[H_FLAGS] & POOLED
    start = int(header[H_SCRATCH])
    text = bytes(FRONT.memory.view[start : start + int(header[H_SCRATCH_BYTES])]).partition(b"\0")[0]
    each = zip(words, json.loads(text), strict=True)
    return by_table(Batch.merged([_batch_of(DEPLOYMENT, FRONT.memory, slot, one, bag) for one, bag in each]))


def assert_same(own, given):
    """The engine has the bags of the request, and writes to the request's memory."""
    for mine, its in zip(own, given, strict=True):
        assert mine.table == its.table
        assert np.array_equal(mine.keys, its.keys)
        assert mine.out.shape == its.out.shape
        if its.out.size:
            assert len(mine.out) == 1 or mine.out.strides[0] == its.out.strides[0]
            assert mine.out.ctypes.data == its.out.ctypes.data
        got, expected = mine.pooling, its.pooling
        for name in ("count", "hotness", "combiner", "max_norm", "padding_key"):
            assert getattr(got, name) == getattr(expected, name), name
        for name in ("offsets", "weights"):
            one, other = getattr(got, name), getattr(expected, name)
            assert (one is None) == (other is None)
            assert one is None or (np.array_equal(one, other) and one.dtype == other.dtype)


@given(bags, options, st.booleans())
def test_bags_as_json_reach_the_engine(tables, more, weighted):
    request = {"bags": tables, **more}
    if weighted:
        request["weights"] = {name: [[key / 2 for key in bag] for bag in lists] for name, lists in tables.items()}
    decoded = decode_lookup(orjson.dumps(request), MODEL, 1000)
    placed, _, _ = place(decoded)
    assert_same(owned_tables(), by_table(decoded.batch))
    assert_untouched(placed.size)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), flags, flags, flags, options, st.sampled_from(["FP32", "FP16"]))
def test_bags_of_all_tables_in_one_output_reach_the_engine(sizes, offsets, weighted, binary, more, wanted):
    """All tables beside each other in the rows of one output: the vectors of each have strides."""
    count = len(sizes)
    if offsets:
        one = [0, *np.cumsum(sizes).tolist()]
        tensors = {"KEYS": np.arange(3 * one[-1]), "OFFSETS": np.array([one] * 3, np.int32)}
        if weighted:
            tensors["WEIGHTS"] = np.arange(3 * one[-1], dtype=np.float32)
    else:
        tensors = dict.fromkeys(NAMES, np.arange(2 * count).reshape(count, 2))
    parameters = {"binary_data_output": binary, "datatype": wanted, **({"combiner": "sum"} | more)}
    body, length = with_tensors(tensors, binary=True, parameters=parameters)
    assert read_cached(body[:length], None, MODEL, 1000).plan is None
    laid = decode_inference(body, length, MODEL, 1000)
    placed, _, _ = place(laid)
    own = owned_tables()
    assert_same(own, by_table(laid.batch))
    expected = decoded(body, length)
    for table, (mine, its) in enumerate(zip(own, by_table(expected.batch), strict=True)):
        mine.out[...] = its.out[...] = 100 * table + np.arange(count)[:, None]
    assert encoded(placed) == body_of(expected)
    assert_untouched(placed.size)


numbers = st.one_of(st.integers(-5, 40), st.sampled_from([8192, 1 << 20, 4 << 20, 1 << 40, 1 << 63, -(1 << 63)]), st.none())
arrays = st.lists(st.one_of(numbers, st.sampled_from(["<i8", "<i4", "<f4", "<c16", "S9", "V8", "O", "<M8"])), max_size=4)
hostile_bags = st.fixed_dictionaries(
    {},
    optional={
        "offsets": arrays | st.tuples(numbers, st.integers(0, 9), st.sampled_from(["<i8", "<i4"])).map(list),
        "weights": arrays,
        "combiner": st.sampled_from(["sum", "x", None, 3]),
        "strides": st.none() | st.lists(numbers, max_size=3),
        **dict.fromkeys(("count", "hotness", "max_norm", "padding_key"), numbers),
    },
)


@given(
    st.integers(0, 2),
    st.integers(0, MOST_KEYS),
    st.integers(0, 50),
    st.sampled_from([SLOT, FRONT.memory.size - 4096]),
    hostile_bags,
)
@example(1, 3, 0, SLOT, {"strides": [4, 4]})
@example(1, 3, 0, SLOT, {"strides": [22, 4]})
@example(1, 3, 0, SLOT, {"strides": [20, 8]})
def test_no_bags_lead_the_engine_out_of_the_region(table, n, spare, slot, described):
    memory = FRONT.memory
    memory.bytes[SLAB:] = 0
    memory.words[slot // 8 : slot // 8 + 300] = np.arange(300) % 4
    words = [table, n, slot + 128, min(slot + 1024, memory.size - 4 * spare), 0]
    plain = {"combiner": "sum", "max_norm": None, "padding_key": None, "strides": None, "count": n, "hotness": 1}
    try:
        batch = _batch_of(DEPLOYMENT, memory, slot, words, plain | described)
    except Exception:  # noqa: BLE001 - whatever it is, the engine answers it
        return
    out, width = batch.outs[0], 4 * DIMS[table]
    if out.size:
        assert out.strides[1] == 4
        assert out.strides[0] >= width
        assert out.strides[0] % 4 == 0
        first = out.ctypes.data - memory.address
        assert slot <= first <= memory.size - (len(out) - 1) * out.strides[0] - width
    assert batch.sizes == (n,)
    pooling = batch.poolings[0]
    assert pooling.count == len(out)
    if pooling.offsets is not None:
        assert pooling.offsets.size == 0 or 0 <= pooling.offsets.min() <= pooling.offsets.max() <= n
    else:
        assert pooling.count * pooling.hotness == n


def test_devices_take_turns_unless_one_is_named_and_lost_ones_have_none_while_there_are_others():
    version = FrontendVersion(MODEL, {0: 256, 3: 513, 4: 770}, InferenceCounts())
    for lost, turns in (([], [0, 3, 4]), ([3], [0, 4]), ([0, 3, 4], [0, 3, 4]), ([], [0, 3, 4])):
        version.exclude_lost(lost)
        assert sorted(version.device(None) for _ in range(12)) == sorted(turns * (12 // len(turns)))
        assert [version.device(device) for device in (3, 0, 3)] == [3, 0, 3]
        with pytest.raises(UnknownDeviceError, match=r"got device 7, expected one of its deployed_device_list \[0, 3, 4\]"):
            version.device(7)
    for device in (None, 0):  # the engine has no room for it
        with pytest.raises(NotReadyError, match="model 'm' is not ready"):
            FrontendVersion(MODEL, {}, InferenceCounts()).device(device)
