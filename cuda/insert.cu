// PURPOSE     Writes rows of keys into a table: replaces those of resident keys, admits keys that are not, or both.
// ARRAYS      keys (n,) int64, in. rows (n, width) words, in, aligned to HPS_PIECE words. chosen (n,) uint8 or null, in: keys
//             whose byte is 0 are left out; null chooses all. buckets and rows of the table, in/out. counters, in/out: keys
//             admitted and keys evicted are added.
// LAUNCH      ceil(n / (HPS_THREADS / 8)) blocks of HPS_THREADS. A tile of 8 lanes owns one key; tiles past a ragged end have none.
// INVARIANTS  A key is in at most one slot of its table. Where a key occurs twice among `keys`, one of its vectors wins, whole.
//             admission.cuh says which slot a key takes, and which keys are refused; placement.cuh says it of static tables,
//             which refuse and evict none: their counter of keys that found no place is added to.
// RACES       A tile changes rows and keys of a pair only while it owns it (writer.cuh). A query that reads meanwhile notices
//             by the version (embedding_cache.cuh). The cache orders launches on one table; admissions of answer.cu run beside them.
// TWIN        hps.cache.cpu.kernels.write

#include "embedding_cache.cuh"
#include "static_tables.cuh"
#include "sharing.cuh"
#include "writer.cuh"
#if HPS_STATIC
#include "placement.cuh"
#else
#include "admission.cuh"
#endif

#ifndef HPS_THREADS
#define HPS_THREADS 256
#endif
#ifndef HPS_MIN_BLOCKS
#define HPS_MIN_BLOCKS 1  // of an SM: bounds the registers
#endif

struct Insert {
    Table table;
    const i64* keys;
    const Piece* rows;
    const u8* chosen;
    u32 n;
    u32 mode;  // REPLACE, ADMIT or both
};

static_assert(sizeof(Table) == 48 && sizeof(Insert) == 80, "hps/cache/cuda/kernels.py packs these");

extern "C" __global__ void __launch_bounds__(HPS_THREADS, HPS_MIN_BLOCKS) insert(const __grid_constant__ Insert request) {
    __shared__ Admissions counts;
    if (threadIdx.x == 0) counts = {0, 0};
    __syncthreads();
    const u32 pieces = request.table.width / HPS_PIECE, index = blockIdx.x * (HPS_THREADS / TILE) + threadIdx.x / TILE;
    const bool pending = index < request.n && (request.chosen == nullptr || request.chosen[index]);
    const i64 key = pending ? __ldcs(request.keys + index) : 0;
    const Piece* const vector = request.rows + static_cast<u64>(index) * pieces;
#if HPS_STATIC
    write_keys(request.table, request.mode, key, pending, vector, pieces, counts);
#else
    write_keys(request.table, request.mode, key, pending, vector, pieces, nullptr, 0, counts);
#endif
    __syncthreads();
    if (threadIdx.x == 0) counts.add_to(request.table.counters);
}
