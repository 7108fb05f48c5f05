"""Which devices may share memory, and in what order it is freed, on a stand-in for CUDA (`tests/fakes/host_cuda.py`)."""

import subprocess
import sys

import pytest

SETUP = """
from tests.fakes import host_cuda
host_cuda.install()
from types import SimpleNamespace
from cupy_backends.cuda.api import runtime
from hps.cache.base import DeviceSharing
from hps.cache.cuda import spread_memory
from hps.cache.cuda.cache import CupyCache
from hps.errors import DeviceError
from hps.testing.caches import spec

def link(value=1, code=0):
    def attribute(to, what, _device, _other):
        assert what == 3
        to._obj.value = value
        return code
    spread_memory._driver = lambda: SimpleNamespace(cuDeviceGetP2PAttribute=attribute)
"""
REASONS = {
    "link(value=0)": "CUDA device 0 has no native atomics in the memory of device 1 (no NVLink)",
    "link(); runtime.deviceCanAccessPeer = lambda _a, _b: 0": "CUDA device 0 cannot access the memory of device 1",
    "link(); runtime.deviceGetAttribute = lambda _a, _b: 0": "CUDA device 0 does not map memory of other devices",
    "link(); devices = tuple(range(16))": "got 16 devices, expected at most 15",
    "link(); devices = (0, 2)": "there is no CUDA device 2",
    "link(); devices = (0, 1, 0)": "got a device twice",
    "link(); runtime.getDeviceCount = lambda: 0": "CuPy finds no CUDA device",
}


def run(script: str) -> None:
    child = subprocess.run([sys.executable, "-c", SETUP + script], capture_output=True, text=True, timeout=120, check=False)
    assert child.returncode == 0, child.stdout + child.stderr


@pytest.mark.parametrize("change", REASONS)
def test_devices_that_cannot_share_memory_say_why(change: str) -> None:
    run(f"devices = (0, 1)\n{change}\nassert {REASONS[change]!r} in CupyCache.reason_against_sharing(devices)\n")


def test_a_cache_of_devices_that_cannot_share_memory_is_refused() -> None:
    run("""
link(value=0)
try:
    CupyCache.create([spec(4)], [1000], 0, False, DeviceSharing((0, 1)))
except DeviceError as error:
    assert "native atomics" in str(error)
else:
    raise AssertionError("it was made")
link()
CupyCache.create([spec(4)], [1000], 0, False, DeviceSharing((0, 1))).close()
""")


DRIVER = """
calls = []
codes = {}  # by the name of a function, what its calls return in turn

class Driver:
    def __getattr__(self, name):
        def call(*arguments):
            first = arguments[0]
            code = codes[name].pop(0) if codes.get(name) else 0
            if name == "cuMemGetAllocationGranularity":
                first._obj.value = 1 << 21
            elif name == "cuMemAddressReserve":
                first._obj.value = 1 << 30
            elif name == "cuMemCreate":
                first._obj.value = 7 + len(calls)
            calls.append((name, arguments))
            return code
        return call

spread_memory._driver = Driver
runtime.deviceSynchronize = lambda: calls.append((("wait", runtime.getDevice()), ()))
names = lambda: [name for name, _ in calls]
MiB = 1 << 20
"""


def test_memory_is_unmapped_when_no_device_uses_it_any_more() -> None:
    run(
        DRIVER
        + """
memory = spread_memory.SpreadMemory([(0, 2 * MiB), (1, 2 * MiB)], (0, 1))
calls.clear()
del memory
assert names()[:2] == [("wait", 0), ("wait", 1)], names()
assert names()[2:] == 2 * ["cuMemUnmap", "cuMemRelease"] + ["cuMemAddressFree"], names()
memory = spread_memory.SpreadMemory([(0, 2 * MiB)], (0, 1))
assert not memory._free.atexit
"""
    )


def test_each_part_is_mapped_where_it_lies_for_all_devices() -> None:
    run(
        DRIVER
        + """
memory = spread_memory.SpreadMemory([(1, 2 * MiB), (0, 6 * MiB), (1, 0), (0, 2 * MiB)], (1, 0))
values = lambda arguments: [one.value for one in arguments]
[reserved] = [arguments for name, arguments in calls if name == "cuMemAddressReserve"]
assert reserved[1].value == 10 * MiB
made = [arguments for name, arguments in calls if name == "cuMemCreate"]
assert [(one[2]._obj.device, one[1].value) for one in made] == [(1, 2 * MiB), (0, 6 * MiB), (0, 2 * MiB)]
places = [values(arguments)[:2] for name, arguments in calls if name == "cuMemMap"]
assert places == [[memory.address, 2 * MiB], [memory.address + 2 * MiB, 6 * MiB], [memory.address + 8 * MiB, 2 * MiB]]
[access] = [arguments for name, arguments in calls if name == "cuMemSetAccess"]
assert (access[0].value, access[1].value, access[3].value) == (memory.address, 10 * MiB, 2)
assert [(one.device, one.flags) for one in access[2]] == [(1, 3), (0, 3)]
"""
    )


@pytest.mark.parametrize(
    ("function", "code", "kind"),
    [("cuMemCreate", 2, "DeviceMemoryError"), ("cuMemCreate", 1, "DeviceError"), ("cuMemMap", 2, "DeviceMemoryError")],
)
def test_what_was_allocated_is_freed_when_a_part_fails(function: str, code: int, kind: str) -> None:
    run(
        DRIVER
        + f"""
codes["{function}"] = [0, {code}]
try:
    spread_memory.SpreadMemory([(0, 2 * MiB), (1, 2 * MiB)], (0, 1))
except DeviceError as error:
    assert type(error).__name__ == "{kind}", type(error)
else:
    raise AssertionError("it was made")
counts = [names().count(name) for name in ("cuMemCreate", "cuMemRelease", "cuMemAddressFree")]
assert counts == ([2, 1, 1] if "{function}" == "cuMemCreate" else [2, 2, 1]), names()
"""
    )


def test_what_a_lost_device_does_not_unmap_is_released() -> None:
    run(
        DRIVER
        + """
memory = spread_memory.SpreadMemory([(0, 2 * MiB), (1, 2 * MiB)], (0, 1))
codes["cuMemUnmap"] = [700, 700]
calls.clear()
del memory
assert names()[2:] == 2 * ["cuMemUnmap", "cuMemRelease"] + ["cuMemAddressFree"], names()
"""
    )


def test_what_cannot_be_allocated_is_refused_before_it_is_loaded() -> None:
    run("""
from hps.cache.base import ALONE
from hps.errors import CapacityError, ConfigError

def refused(rows, sharing):
    try:
        CupyCache.check_room([spec(4)], [rows], 0, sharing=sharing)
    except (CapacityError, ConfigError, DeviceError) as error:
        return type(error).__name__, str(error)

shared = DeviceSharing((0, 1))
assert refused(1000, shared) is None
kind, text = refused(1 << 31, shared)
assert kind == "ConfigError" and "expected at most 2,147,483,647, or device_sharing replicate" in text
assert refused(1 << 31, ALONE)[0] == "CapacityError"
assert refused(1 << 32, ALONE)[0] == "ConfigError"

def lost():
    raise runtime.CUDARuntimeError(700)
runtime.memGetInfo = lost
kind, text = refused(1000, ALONE)
assert kind == "DeviceError" and "the process has to be restarted" in text
""")
