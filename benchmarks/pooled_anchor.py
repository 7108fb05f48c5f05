"""Plain kernels that gather and add up the rows of bags whose places are known: the limit of a pooled lookup on a GPU.

All tables in one launch. Each kernel is right for any bags; they differ in how many loads are in flight (AHEAD), and in how
many keys a group of lanes is given (RUN): one bag where bags are long, several where they are short. The best of them counts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

VARIANTS = [(ahead, run) for ahead in (4, 8) for run in (1, 8, 16)]
_THREADS = 256
_PART = np.dtype(
    [
        ("rows", np.uint64),
        ("places", np.uint64),
        ("offsets", np.uint64),
        ("out", np.uint64),
        ("bags", np.uint32),
        ("bags_at_once", np.uint32),
        ("first_block", np.uint32),
        ("stride", np.uint32),
    ]
)
SOURCE = r"""
struct Part {
    const float4* rows;    // of the table
    const int* places;     // (n,) int32: the row of each key
    const int* offsets;    // (bags + 1,) int32
    float4* out;           // bag b at b * stride
    unsigned bags, bags_at_once, first_block, stride;
};

__device__ __forceinline__ float4 load_row(const float4* at) {
    float4 v;
    asm("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at));
    return v;
}

template <int LANES, int AHEAD>
__device__ __forceinline__ void add_up(const Part* parts, const unsigned char* part_of_block) {
    const Part part = parts[part_of_block[blockIdx.x]];
    const unsigned group = (blockIdx.x - part.first_block) * (256 / LANES) + threadIdx.x / LANES, lane = threadIdx.x % LANES;
    unsigned bag = group * part.bags_at_once;
    if (bag >= part.bags) return;
    const unsigned last = min(bag + part.bags_at_once, part.bags);
    int key = __ldg(part.offsets + bag), end = __ldg(part.offsets + bag + 1);
    const int stop = last == bag + 1 ? end : __ldg(part.offsets + last);
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (; key < stop; key += AHEAD) {
        float4 value[AHEAD];
        if (key + AHEAD <= stop) {
            int place[AHEAD];
#pragma unroll
            for (int j = 0; j < AHEAD; ++j) place[j] = __ldg(part.places + key + j);
#pragma unroll
            for (int j = 0; j < AHEAD; ++j) value[j] = load_row(part.rows + size_t(place[j]) * LANES + lane);
        } else {
#pragma unroll
            for (int j = 0; j < AHEAD; ++j)
                if (key + j < stop) value[j] = load_row(part.rows + size_t(__ldg(part.places + key + j)) * LANES + lane);
        }
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            if (key + j >= stop) break;
            while (key + j >= end) {
                __stcs(part.out + size_t(bag) * part.stride + lane, sum);
                sum = make_float4(0.f, 0.f, 0.f, 0.f);
                ++bag;
                end = __ldg(part.offsets + bag + 1);
            }
            sum.x += value[j].x, sum.y += value[j].y, sum.z += value[j].z, sum.w += value[j].w;
        }
    }
    for (; bag < last; ++bag) {
        __stcs(part.out + size_t(bag) * part.stride + lane, sum);
        sum = make_float4(0.f, 0.f, 0.f, 0.f);
    }
}

#define KERNEL(LANES, AHEAD) \
    extern "C" __global__ void __launch_bounds__(256) add_up_##LANES##_##AHEAD(const Part* parts, const unsigned char* of) { \
        add_up<LANES, AHEAD>(parts, of); \
    }
KERNEL(8, 4) KERNEL(8, 8) KERNEL(16, 4) KERNEL(16, 8) KERNEL(32, 4) KERNEL(32, 8)
"""


def plan(
    tables: Sequence[tuple[int, int, int, int]],
    bags: int,
    hotness: Sequence[int],
    dim: int,
    stride: int,
    run: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The parts of a launch, those with the most keys first, and the part of each block.

    Args:
        tables: of each, the addresses of rows, places, offsets and output.
        dim: 32, 64 or 128.
        stride: floats from one bag's output to the next.
        run: keys that a group of lanes is given, at least, unless one bag has more.
    """
    parts = np.zeros(len(tables), _PART)
    blocks: list[int] = []
    groups_per_block = _THREADS // (dim // 4)
    for nth, index in enumerate(sorted(range(len(tables)), key=lambda index: -hotness[index])):
        at_once = max(1, run // hotness[index])
        parts[nth] = (*tables[index], bags, at_once, len(blocks), stride // 4)
        blocks += [nth] * -(-bags // (at_once * groups_per_block))
    return parts, np.array(blocks, np.uint8)


def launcher(kernel: Any, parts: Any, part_of_block: Any, blocks: int) -> Callable[[], None]:
    """What launches a kernel on CuPy's current stream; parts and blocks are arrays of bytes on the device."""

    def launch() -> None:
        kernel((blocks,), (_THREADS,), (parts, part_of_block))

    return launch
