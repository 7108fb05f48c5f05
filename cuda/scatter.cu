// PURPOSE     Writes a vector to every missing position of a segment: the fetched one, or the default.
// ARRAYS      positions (n,) uint32, in: rows of `out`. rows (n,) uint32, in: rows of `vectors`; not read without `fetched`.
//             fetched (u,) uint8 or null, in: whether a row of `vectors` was fetched; null stands for none. vectors (u, dim)
//             float32, in, aligned to HPS_UNIT floats. out (., dim) float32, out, aligned likewise. found (.,) uint8 or null,
//             out. `vectors` and `fetched` may be in mapped host memory.
// LAUNCH      Blocks of HPS_THREADS, ceil(n / (HPS_THREADS / 8)) of them. A tile of 8 lanes owns one position. n = 0 is not
//             launched; tiles past a ragged end have no position.
// INVARIANTS  Positions are distinct. `found` becomes 1 at positions whose vector was fetched and 0 at the others.
// RACES       None.
// TWIN        hps.cache.cpu.kernels.scatter

#include "embedding_cache.cuh"

#ifndef HPS_THREADS
#define HPS_THREADS 256
#endif

struct Scatter {
    const u32* positions;
    const u32* rows;
    const u8* fetched;
    const Unit* vectors;
    Unit* out;
    u8* found;
    u32 n;
    u32 units;  // of a row: dim / HPS_UNIT
    float default_value;
    u32 padding;
};

constexpr u32 TILE = 8;

static_assert(sizeof(Scatter) == 64, "hps/cache/cuda/kernels.py packs this");

extern "C" __global__ void __launch_bounds__(HPS_THREADS) scatter(const __grid_constant__ Scatter request) {
    const u32 member = threadIdx.x % TILE;
    const u32 index = blockIdx.x * (HPS_THREADS / TILE) + threadIdx.x / TILE;
    if (index >= request.n) return;
    const u32 units = request.units, position = request.positions[index];
    const u32 row = request.fetched != nullptr ? request.rows[index] : 0;
    const bool fetched = request.fetched != nullptr && request.fetched[row];
    Unit* out = request.out + static_cast<u64>(position) * units;
    if (fetched) {
        const Unit* vector = request.vectors + static_cast<u64>(row) * units;
#pragma unroll 4
        for (u32 unit = member; unit < units; unit += TILE) stream_out(out + unit, stream_in(vector + unit));
    } else {
        Unit value;
#pragma unroll
        for (u32 i = 0; i < UNIT; ++i) value.value[i] = request.default_value;
        for (u32 unit = member; unit < units; unit += TILE) stream_out(out + unit, value);
    }
    if (member == 0 && request.found != nullptr) request.found[position] = fetched;
}
