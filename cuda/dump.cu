// PURPOSE     Lists the resident keys of a table.
// ARRAYS      buckets of the table, in. keys (14 n,) int64, out, in any order: those of pairs [first, first + n). count
//             uint64, in/out: must be 0 before, the number of keys after.
// LAUNCH      Blocks of HPS_THREADS, ceil(n / (HPS_THREADS / 8)) of them. 8 lanes own one pair. n = 0 is not launched; lanes
//             past a ragged end have no pair.
// INVARIANTS  Each resident key is in the list once.
// RACES       Keys do not move, so a key that stays resident is listed whatever is modified meanwhile. Those of static tables do:
//             the cache runs no insert beside a dump on the same device (modifications.py); beside one on another device, a key that
//             moves may be listed twice or not at all, and a key that was erased may be listed. One atomic add a warp reserves places.
// TWIN        hps.cache.cpu.kernels.dump

#include "embedding_cache.cuh"
#include "static_tables.cuh"

#ifndef HPS_THREADS
#define HPS_THREADS 256
#endif

struct Dump {
    Table table;
    i64* keys;
    u64* count;
    u32 first;
    u32 n;
};

static_assert(sizeof(Table) == 48 && sizeof(Dump) == 72, "hps/cache/cuda/kernels.py packs these");
extern "C" __global__ void __launch_bounds__(HPS_THREADS) dump(const __grid_constant__ Dump request) {
    const Table& table = request.table;
    const u32 lane = threadIdx.x % 32, member = lane % PAIR_PARTS;
    const u32 nth = blockIdx.x * (HPS_THREADS / PAIR_PARTS) + threadIdx.x / PAIR_PARTS, pair = request.first + nth;
    i64 low = 0, high = 0;
    bool has_low = false, has_high = false;
    uint4 part = make_uint4(0, 0, 0, 0);
    if (nth < request.n) part = load_part(table.buckets + static_cast<u64>(pair) * PAIR_PARTS + member);
#if HPS_STATIC
    const u32 occupied = occupied_of(__shfl_sync(FULL_WARP, part.x, lane / BUCKET_PARTS * BUCKET_PARTS));
#endif
    if (nth < request.n) {
        low = key_of(part.x, part.y);
        high = key_of(part.z, part.w);
#if HPS_STATIC
        has_low = member % BUCKET_PARTS != 0 && occupied >> (2 * (member % BUCKET_PARTS) - 1) & 1;
        has_high = occupied >> (2 * (member % BUCKET_PARTS)) & 1;
#else
        const i64 filler = filler_of(table, pair);
        has_low = member % BUCKET_PARTS != 0 && low != filler;
        has_high = high != filler;
#endif
    }
    const u32 lows = __ballot_sync(FULL_WARP, has_low), highs = __ballot_sync(FULL_WARP, has_high);
    if ((lows | highs) == 0) return;
    u64 place = 0;
    if (lane == 0) place = atomicAdd(request.count, static_cast<u64>(__popc(lows) + __popc(highs)));
    place = __shfl_sync(FULL_WARP, place, 0);
    const u32 before = (1u << lane) - 1;
    if (has_low) request.keys[place + __popc(lows & before)] = low;
    if (has_high) request.keys[place + __popc(lows) + __popc(highs & before)] = high;
}
