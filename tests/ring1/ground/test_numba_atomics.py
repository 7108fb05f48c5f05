"""The order of loads and stores on arm64, where the hardware would reorder them, read off the machine code."""

import re

import numpy as np
from llvmlite import binding
from numba import boolean, int64, njit, uint64, void

from hps.cache.cpu import sets
from hps.ground.kernels import numba_atomics as atomics
from hps.stores.hash_map.layout import match_keys

TRIPLE = "aarch64-unknown-linux-gnu"


@njit(uint64(uint64, int64))
def probe(bucket, key):
    header = atomics.load_acquire(bucket)
    found = match_keys(bucket, key)
    atomics.fence_acquire()
    return found if atomics.load_relaxed(bucket) == header else np.uint64(0)


@njit(boolean(uint64, uint64, uint64, uint64))
def copy(target, source, header_at, header):
    return atomics.copy_if_unchanged(target, source, np.uint64(2), header_at, header)


@njit(uint64(uint64, uint64))
def write(bucket, key):
    header = atomics.load_relaxed(bucket)
    atomics.store_relaxed(bucket, header + np.uint64(1))
    atomics.fence_release()
    atomics.store_relaxed(bucket + np.uint64(8), key)
    atomics.store_release(bucket, header + np.uint64(2))
    return header


@njit(int64(int64, int64, int64))
def probe_set(line, key, wraps_at):
    wraps = atomics.load_acquire(wraps_at)
    version = atomics.load_acquire_u16(line)
    slot = sets.find(line, key)
    return slot if sets.unchanged(line, version, wraps_at, wraps) else -2


@njit(void(int64, int64, int64))
def change_set(line, key, wraps_at):
    version = sets.acquire(line)
    atomics.store_relaxed(line + 16, key)
    sets.release_changed(line, version, wraps_at)


def arm64(function):
    """The instructions of a function that touch memory or order it, as arm64 has them."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    code = function.inspect_llvm(function.signatures[0])
    code = re.sub(r"target datalayout = .*", "", re.sub(r"target triple = .*", f'target triple = "{TRIPLE}"', code))
    machine = binding.Target.from_triple(TRIPLE).create_target_machine(opt=3)
    body = machine.emit_assembly(binding.parse_assembly(code)).partition("\tret")[0]
    return re.findall(r"^\t((?:ld|st|dmb)\w*\t.*)$", body, re.MULTILINE)


def test_a_probe_loads_the_keys_between_two_loads_of_the_header():
    before, fence, after = "\n".join(arm64(probe)).partition("dmb\tishld")
    assert fence
    assert re.match(r"ldar\tx\d+, \[x2\]", before)
    assert len(re.findall(r"q\d+, \[x2", before)) == 6
    assert re.findall(r"\w+\t\w\d+, \[x2.*\]", after) == re.findall(r"ldr\tx\d+, \[x2\]", after) != []


def test_a_copy_loads_all_of_the_vector_then_the_header_then_stores():
    before, fence, after = "\n".join(arm64(copy)).partition("dmb\tishld")
    assert fence
    assert "st" not in before
    assert len(re.findall(r"q\d+", before)) == 8
    assert re.match(r"\nldr\tx\d+, \[x4\]", after)
    assert len(re.findall(r"q\d+", after)) == 8


def test_a_change_lies_between_two_stores_of_the_header():
    instructions = arm64(write)
    first = next(i for i, text in enumerate(instructions) if re.match(r"str\tx\d+, \[x2\]", text))
    assert instructions[first + 1] == "dmb\tish"
    assert re.match(r"str\tx3, \[x2, #8\]", instructions[first + 2])
    assert re.match(r"stlr\tx\d+, \[x2\]", instructions[first + 3])


def test_a_set_is_read_between_two_loads_of_its_version_and_of_the_wraps():
    before, fence, after = "\n".join(arm64(probe_set)).partition("dmb\tishld")
    assert fence
    assert re.match(r"ldar\tx\d+, \[x4\]\nldarh\tw\d+, \[x2\]\n", before)
    assert len(re.findall(r"q\d+, \[x2", before)) == 8 + 1
    assert re.search(r"ldarh\tw\d+, \[x2\]\nldr\tx\d+, \[x4\]", after)
    assert not re.search(r"q\d+, \[x2", after)


def test_a_set_is_changed_between_the_swap_and_the_store_of_its_version():
    before, fence, after = "\n".join(arm64(change_set)).partition("dmb\tish\n")
    assert fence
    assert re.search(r"ldaxrh\tw\d+, \[(x\d+)\]\nstxrh\tw\d+, w\d+, \[\1\]\n$", before)
    assert re.match(r"str\tx\d+, \[(x\d+), #16\]\n(.*\n)*stlrh\tw\d+, \[\1\]", after)
