// PURPOSE     Copies changed buckets of a table in the host's memory to the mirror of its buckets on the device.
// ARRAYS      copies (n,) of two uint64 each, in mapped host memory, in: addresses of a bucket and of its copy, both 128-byte
//             aligned. The buckets in the host's memory, in; their copies in device memory, out.
// LAUNCH      ceil(n / (HPS_THREADS / 8)) blocks of HPS_THREADS. 8 lanes copy a bucket, 16 bytes each; those past a ragged end have none.
// INVARIANTS  A bucket may be named twice: nothing changes it meanwhile, so its copies are equal.
// RACES       Queries may read a copy meanwhile. They keep nothing that they read of it, since the versions of the stripes that it
//             concerns have changed before (host_table.cuh); the mirror's own versions are stored behind this launch.
// TWIN        tests.tables.host_layout_reader.MirroredTable

#include "embedding_cache.cuh"
#include "host_table.cuh"

#ifndef HPS_THREADS
#define HPS_THREADS 256
#endif

struct Mirror {
    const ulonglong2* copies;
    u64 n;
};

static_assert(sizeof(Mirror) == 16, "hps/cache/cuda/kernels.py packs this");

extern "C" __global__ void __launch_bounds__(HPS_THREADS) mirror(const __grid_constant__ Mirror request) {
    constexpr u32 LANES = HOST_BUCKET / 16;
    const u64 index = static_cast<u64>(blockIdx.x) * (HPS_THREADS / LANES) + threadIdx.x / LANES;
    if (index >= request.n) return;
    const ulonglong2 copy = request.copies[index];
    reinterpret_cast<uint4*>(copy.y)[threadIdx.x % LANES] = load_host_part(copy.x + 16 * (threadIdx.x % LANES));
}
