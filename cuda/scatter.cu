// PURPOSE     Writes a vector to every missing position of a segment: the fetched one, or the default.
// ARRAYS      positions (n,) uint32, in: rows of `out`. rows (n,) uint32, in: rows of `vectors`; not read without `fetched`.
//             fetched (u,) uint8 or null, in: whether a row of `vectors` was fetched; null stands for none. vectors (u, width)
//             words, in: rows. out (., dim) of format HPS_OUT, out, aligned to HPS_UNIT elements. found (.,) uint8 or null,
//             out. `vectors` and `fetched` may be in mapped host memory.
// LAUNCH      Blocks of HPS_THREADS, ceil(n / (HPS_THREADS / 8)) of them. A tile of 8 lanes owns one position. n = 0 is not
//             launched; tiles past a ragged end have no position.
// INVARIANTS  Positions are distinct. `found` becomes 1 at positions whose vector was fetched and 0 at the others.
// RACES       None.
// TWIN        hps.cache.cpu.kernels.scatter

#include "embedding_cache.cuh"
#include "rows.cuh"

#ifndef HPS_THREADS
#define HPS_THREADS 256
#endif

struct Scatter {
    const u32* positions;
    const u32* rows;
    const u8* fetched;
    const u8* vectors;
    OutUnit* out;
    u8* found;
    u32 n;
    u32 units;  // of a vector: dim / HPS_UNIT; above FORMAT_SHIFT the format of the rows
    float default_value;
    u32 padding;
};

constexpr u32 TILE = 8;

static_assert(sizeof(Scatter) == 64, "hps/cache/cuda/kernels.py packs this");

template <u32 FORMAT>
__device__ __forceinline__ void copy_row(const Scatter& request, u32 row, OutUnit* out) {
    if constexpr (!OCCURS<FORMAT>) return;
    const u32 units = units_of(request.units), dim = units * UNIT;
    const u8* const source = request.vectors + static_cast<u64>(row) * (4 * width_of(FORMAT, dim));
#pragma unroll 4
    for (u32 unit = threadIdx.x % TILE; unit < units; unit += TILE) {
        Stored<FORMAT, OwnMemory> value;
        value.load(source, unit, dim);
        stream_out(out + unit, narrowed(value.widened()));
    }
}

extern "C" __global__ void __launch_bounds__(HPS_THREADS) scatter(const __grid_constant__ Scatter request) {
    const u32 member = threadIdx.x % TILE;
    const u32 index = blockIdx.x * (HPS_THREADS / TILE) + threadIdx.x / TILE;
    if (index >= request.n) return;
    const u32 units = units_of(request.units), position = request.positions[index];
    const u32 row = request.fetched != nullptr ? request.rows[index] : 0;
    const bool fetched = request.fetched != nullptr && request.fetched[row];
    OutUnit* const out = request.out + static_cast<u64>(position) * units;
    if (fetched) {
        switch (format_of(request.units)) {
            case FLOAT32: copy_row<FLOAT32>(request, row, out); break;
            case FLOAT16: copy_row<FLOAT16>(request, row, out); break;
            case BFLOAT16: copy_row<BFLOAT16>(request, row, out); break;
            case INT8: copy_row<INT8>(request, row, out); break;
        }
    } else {
        Unit value;
#pragma unroll
        for (u32 i = 0; i < UNIT; ++i) value.value[i] = request.default_value;
        for (u32 unit = member; unit < units; unit += TILE) stream_out(out + unit, narrowed(value));
    }
    if (member == 0 && request.found != nullptr) request.found[position] = fetched;
}
